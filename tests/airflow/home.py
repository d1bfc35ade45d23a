"""An ``AIRFLOW_HOME`` of its own for a test session: made before anything imports airflow, which reads it once."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def _make() -> Path:
    home = Path(tempfile.mkdtemp(prefix="swift-airflow-test-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    for name in [name for name in os.environ if name.startswith("AIRFLOW")]:
        del os.environ[name]
    os.environ.update(
        {
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(PROJECT / "dags"),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(PROJECT / "plugins"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            "SWIFT_CONFIG_DIR": str(PROJECT / "include" / "configs"),
            # What clusters/local.yaml refers to; no test of a DAG file starts anything there.
            "SWIFT_LOCAL_DIR": str(home / "local"),
            "SWIFT_LOCAL_PYTHON": "/usr/bin/python3",
        }
    )
    return home


HOME = _make()
