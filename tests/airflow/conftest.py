"""Airflow without its servers: a home of its own, and the loopback nodes of the cluster tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.airflow.home import PROJECT  # before anything here imports airflow

# ruff: isort: split
from tests.cluster.conftest import loopback_nodes, site  # noqa: F401 - fixtures


@pytest.fixture
def python() -> Callable[[str], str]:
    """Runs code in a fresh interpreter with this session's Airflow; returns what it printed last."""

    def run(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PROJECT, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip().splitlines()[-1]

    return run
