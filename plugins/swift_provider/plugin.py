"""The Airflow plugin: what the web UI and every Airflow component load."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin


class SwiftPlugin(AirflowPlugin):
    """Makes the package known to Airflow as a plugin."""

    name = "swift"
