"""How long Airflow's DAG processor needs for the shipped DAG file, against a bare DAG of six empty tasks.

Each parse runs in a fresh interpreter that has already imported Airflow's SDK, as the DAG processor has when it forks.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import PROJECT, Row, run_cases

REPETITIONS = 5
BARE = """\
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG

with DAG("bare", schedule=None):
    tasks = [EmptyOperator(task_id=name) for name in ("plan", "preflight", "stage", "train", "backup", "prune")]
    for before, after in zip(tasks, tasks[1:]):
        before >> after
"""
#: Imports what every DAG processor has loaded before it opens a DAG file, then times one file, and then the same again.
PROBE = """\
import runpy, sys, time
import airflow.sdk, airflow.sdk.definitions.dag, airflow.dag_processing.processor
began = time.perf_counter()
runpy.run_path(sys.argv[1])
first = time.perf_counter() - began
began = time.perf_counter()
runpy.run_path(sys.argv[1])
print(first, time.perf_counter() - began)
"""


def parse(file: Path, home: Path) -> tuple[float, float]:
    """Seconds of the first parse of ``file`` in a fresh interpreter, and of a second one there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    environment |= {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "SWIFT_CONFIG_DIR": str(PROJECT / "include" / "configs"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(file)], env=environment, capture_output=True, text=True, check=True, cwd=home
    )
    first, again = done.stdout.split()[-2:]
    return float(first), float(again)


def dag_import() -> list[Row]:
    """Both files, taking turns, so that a busy machine is busy for both; the first turn only warms the disk's cache."""
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as folder:
        home, bare = Path(folder), Path(folder) / "bare.py"
        bare.write_text(BARE)
        turns = [(parse(PROJECT / "dags" / "swift_train.py", home), parse(bare, home)) for _ in range(REPETITIONS + 1)][
            1:
        ]
    rows = []
    for index, what in enumerate(("first parse in a process (cold modules)", "every further parse")):
        ours = statistics.median(ours[index] for ours, _ in turns)
        peer = statistics.median(peer[index] for _, peer in turns)
        rows.append(Row(what, ours * 1000, peer * 1000, "ms", f"median of {REPETITIONS}; peer: six EmptyOperators"))
    return rows


if __name__ == "__main__":
    sys.exit(run_cases("benchmarks.dag_import", {"dag_import": dag_import}, __doc__ or ""))
