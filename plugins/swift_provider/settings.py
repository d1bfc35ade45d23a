"""Where this installation keeps its files. Everything that is read from the environment is read here."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path


def config_dir() -> Path:
    """The folder with ``recipes/``, ``clusters/`` and ``deepspeed/``.

    ``SWIFT_CONFIG_DIR`` if it is set, else ``include/configs`` of ``AIRFLOW_HOME``, else that of the source checkout.
    """
    configured = os.environ.get("SWIFT_CONFIG_DIR")
    if configured:
        return Path(configured)
    home = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "include" / "configs"
    if home.is_dir():
        return home
    return Path(__file__).resolve().parents[2] / "include" / "configs"


def default_recipe(names: list[str]) -> str | None:
    """The recipe that the form of ``swift_train`` proposes: ``SWIFT_DEFAULT_RECIPE``, else the first by name."""
    wanted = os.environ.get("SWIFT_DEFAULT_RECIPE")
    return wanted if wanted in names else next(iter(names), None)


def origin() -> str:
    """What names this Airflow installation in a lease, for whoever finds a node busy."""
    return os.environ.get("AIRFLOW__API__BASE_URL") or os.uname().nodename


def retry_delay(usual: timedelta) -> timedelta:
    """The pause before a task's next try: ``SWIFT_RETRY_DELAY_S`` seconds if it is set, else ``usual``.

    For tests and for trying things out, where minutes between two tries are in the way.
    """
    seconds = os.environ.get("SWIFT_RETRY_DELAY_S")
    return timedelta(seconds=float(seconds)) if seconds else usual
