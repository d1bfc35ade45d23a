"""An Airflow database of its own for the tests of this folder, made once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
HOME = Path(tempfile.mkdtemp(prefix="swift-airflow-test-"))

# Before anything imports airflow: it reads its configuration once.
os.environ.update(
    {
        "AIRFLOW_HOME": str(HOME),
        "AIRFLOW__CORE__DAGS_FOLDER": str(PROJECT / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(PROJECT / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{HOME}/airflow.db",
        "SWIFT_CONFIG_DIR": str(PROJECT / "include" / "configs"),
    }
)


def airflow(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``airflow ARGUMENTS`` in this database."""
    command = [sys.executable, "-m", "airflow", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
