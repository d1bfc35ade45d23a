"""The Airflow plugin: what the web UI and every Airflow component load."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin

from swift_provider import listener


class SwiftPlugin(AirflowPlugin):
    """Hears a user's cancel in the API server; see :mod:`swift_provider.listener`."""

    name = "swift"
    listeners = [listener]  # noqa: RUF012 - the attribute that Airflow reads
