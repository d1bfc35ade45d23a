"""What our supervisor takes from a machine that trains: processor, memory, a step's time with and without it.

The training is real: torchrun with two ranks, gloo and a small torch model, in the trainer environment. It runs by
turns under the supervisor and by itself, with the same command and environment.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import Row, run_cases
from benchmarks.nodes import loopback, run_program
from swift_provider.planning.launch import job_spec
from tests.cluster.sites import Site, until
from trainer.protocol import Owner, Phase

SECONDS, TURNS = 20.0, 4
TICKS = os.sysconf("SC_CLK_TCK")


def supervised(site: Site, turn: int, result: Path) -> tuple[list[float], float, float]:
    """Step times, percent of a core, and the supervisor's own memory (MB)."""
    plan = with_result(site, result)
    job = site.start(plan, generation=turn + 1)
    [pid] = site.supervisors("node1")
    until(lambda: b"step " in site.log("node1", job), 120)
    began, before = time.monotonic(), cpu_of(pid)
    until(
        lambda: site.state("node1", job).phase != Phase.RUNNING or time.monotonic() - began > SECONDS - 5, 2 * SECONDS
    )
    share = 100 * (cpu_of(pid) - before) / (time.monotonic() - began)
    memory = memory_of(pid)
    until(lambda: site.state("node1", job).phase == Phase.EXITED, 60)
    return json.loads(result.read_text()), share, memory


def alone(site: Site, result: Path) -> list[float]:
    plan = with_result(site, result)
    spec = job_spec(plan, plan.nodes[0], job_id="alone", owner=Owner(), staged={})
    subprocess.run(spec.argv, env={**os.environ, **spec.env}, check=True, capture_output=True)
    return list(json.loads(result.read_text()))


def with_result(site: Site, result: Path):  # type: ignore[no-untyped-def]
    plan = site.plan(slots=2)
    env = {**plan.env, "LOOP_RESULT": str(result), "LOOP_SECONDS": str(SECONDS), "OMP_NUM_THREADS": "1"}
    return plan.model_copy(update={"env": env})


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_of(pid: int) -> float:
    """Resident memory, as ``VmRSS`` says it."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / 1e6


def fast(times: list[float]) -> float:
    return statistics.quantiles(times, n=10)[0]


def supervisor() -> list[Row]:
    with loopback(1) as site:
        run_program(site, (Path(__file__).parent / "torch_loop.py").read_text())
        ours: list[float] = []
        peer: list[float] = []
        shares, memories = [], []
        for turn in range(TURNS):
            times, share, memory = supervised(site, turn, site.packages / f"with-{turn}")
            ours, shares, memories = ours + times, [*shares, share], [*memories, memory]
            peer += alone(site, site.packages / f"without-{turn}")
    note = f"{TURNS} x {SECONDS:g} s by turns, {len(ours)} and {len(peer)} steps; peer: torchrun by itself"
    return [
        Row("time of a step, median", 1000 * statistics.median(ours), 1000 * statistics.median(peer), "ms", note),
        Row(
            "time of a step, fastest tenth",
            1000 * fast(ours),
            1000 * fast(peer),
            "ms",
            "what a busy machine moves least",
        ),
        Row("supervisor's processor", max(shares), None, "% core", "the larger of the turns"),
        Row("supervisor's resident memory", max(memories), None, "MB", "the larger of the turns"),
    ]


if __name__ == "__main__":
    sys.exit(run_cases("benchmarks.supervisor", {"supervisor": supervisor}, __doc__ or ""))
