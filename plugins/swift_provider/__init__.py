"""Airflow provider for nightly multi-node training of large language models with ms-swift."""

__version__ = "0.1.0"
