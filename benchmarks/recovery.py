"""A rank is killed: how long until nothing of the gang is left on any node, and until the next one trains.

Two loopback nodes with one rank each, torchrun and gloo, the same small torch loop on both sides. Ours: supervisors on
the nodes and a follower that polls every 2 s, as the trigger does; then the next generation with the train operator's
own steps. The peer: the two torchruns alone. Airflow's scheduler and the retry delay lie between the two rows and are
no part of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, run_cases
from benchmarks.nodes import loopback, run_program
from swift_provider.hooks.group import NodeGroup
from swift_provider.planning.launch import job_spec
from swift_provider.planning.plan import LaunchPlan
from swift_provider.triggers.follower import GangFollower
from tests.cluster.sites import Site, kill, until
from trainer.process import descendants
from trainer.protocol import Owner, Phase

REPETITIONS, POLL_S, PATIENCE_S = 3, 2.0, 60.0


def rank_below(pids: set[int]) -> int:
    """A rank of the torch loop among the processes."""
    return next(pid for pid in pids if b"\0rank\0" in cmdline(pid) and b"torch.distributed" not in cmdline(pid))


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def ours(site: Site, turn: int) -> tuple[float, float]:
    """Seconds from the kill to the last process gone, and to the ranks of the next generation."""
    plan = training(site)
    handle = site.handle(plan, 2 * turn + 1)
    site.with_group(plan, lambda group: site.gang(plan, group).start(handle, None))
    for node in plan.nodes:
        until(lambda node=node: b"step " in site.log(node.name, handle.job_id), PATIENCE_S)
    gone: list[float] = []

    async def follow(group: NodeGroup) -> None:
        follower = GangFollower(group, handle.job_id)
        watch = asyncio.create_task(asyncio.to_thread(wait_for_none))
        await follower.poll()
        await asyncio.sleep(POLL_S * turn / REPETITIONS)  # the kill falls into another part of the pause each time
        killed.append(time.monotonic())
        kill(rank_below(site.processes("node2")), signal.SIGKILL)
        while not follower.over:
            await asyncio.sleep(POLL_S)
            await follower.poll()
        await watch

    def wait_for_none() -> None:
        until(lambda: killed, PATIENCE_S)
        until(lambda: not any(site.processes(node.name) for node in plan.nodes), PATIENCE_S)
        gone.append(time.monotonic())

    killed: list[float] = []
    site.with_group(plan, follow)
    following = site.handle(plan, 2 * turn + 2)

    async def again(group: NodeGroup) -> Any:
        gang = site.gang(plan, group)
        await gang.stop(handle.job_id, "superseded")
        await gang.wait_until_over(handle.job_id)
        return await gang.start(following, await gang.newest_complete_checkpoint())

    began = time.monotonic()
    states = site.with_group(plan, again)
    assert all(state.phase == Phase.RUNNING for state in states.values())
    restarted = time.monotonic() - began
    site.with_group(plan, lambda group: site.gang(plan, group).stop(following.job_id, "measured"))
    until(lambda: not any(site.supervisors(node.name) for node in plan.nodes), PATIENCE_S)
    return gone[0] - killed[0], restarted


def torchrun_alone(site: Site) -> float:
    """Seconds from the kill to the end of both torchruns and all their ranks."""
    plan = training(site)
    logs = [site.packages / f"alone-{node.name}" for node in plan.nodes]
    running = []
    for node, log in zip(plan.nodes, logs, strict=True):
        spec = job_spec(plan, node, job_id="alone", owner=Owner(), staged={})
        with open(log, "wb") as stream:
            process = subprocess.Popen(spec.argv, env={**os.environ, **spec.env}, stdout=stream, stderr=stream)
        running.append(process)
    try:
        for log in logs:
            until(lambda log=log: b"step " in log.read_bytes(), PATIENCE_S)
        ranks = {identity.pid for identity in descendants([running[1].pid])}
        began = time.monotonic()
        kill(rank_below(ranks), signal.SIGKILL)
        until(lambda: all(process.poll() is not None for process in running), PATIENCE_S)
        return time.monotonic() - began
    finally:
        for process in running:
            for identity in descendants([process.pid]):
                kill(identity.pid, signal.SIGKILL)
            process.kill()
            process.wait()


def training(site: Site) -> LaunchPlan:
    plan = site.plan(grace=30.0)
    return plan.model_copy(update={"env": {**plan.env, "OMP_NUM_THREADS": "1"}})


def recovery() -> list[Row]:
    with loopback(2) as site:
        run_program(site, (Path(__file__).parent / "torch_loop.py").read_text())
        pairs = [(ours(site, turn), torchrun_alone(site)) for turn in range(REPETITIONS)]
    gone = [mine[0] for mine, _ in pairs]
    note = f"median of {REPETITIONS}, {min(gone):.1f} to {max(gone):.1f} s; peer: torchrun alone"
    return [
        Row(
            "rank killed: nothing left on both nodes",
            statistics.median(gone),
            statistics.median(p for _, p in pairs),
            "s",
            note,
        ),
        Row(
            "next generation: decision to ranks running",
            statistics.median(m[1] for m, _ in pairs),
            None,
            "s",
            "torchrun alone stays down",
        ),
    ]


if __name__ == "__main__":
    sys.exit(run_cases("benchmarks.recovery", {"recovery": recovery}, __doc__ or ""))
