"""The ``swift-provider`` command: what the DAGs check and plan, without Airflow."""

from swift_provider.cli.app import main

__all__ = ["main"]
