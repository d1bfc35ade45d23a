"""Submit → the training process runs on the last node: our two-phase start against plain SSH for the same.

The nodes are addresses of this machine, sixteen to an sshd, each with a work folder of its own, and share its cores:
at 64 nodes the node side's processor time is paid 64 times on one machine, which a cluster pays in parallel. So each
case also shows the controller's own processor time, which is what a cluster pays in one place. Every repetition opens
new connections; the agent is on the nodes already, as it is after the checks before a run. The training is ``sleep``
behind the real interpreter of the training environment, for us and for the peers. The peers know no lease, no state,
no second phase, no supervisor and no log.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, run_cases
from benchmarks.nodes import connect, cpu_seconds, in_loop, loopback, run_program
from swift_provider.hooks.nodes import NodesHook
from swift_provider.planning.launch import job_spec
from tests.cluster.sites import Site, kill
from trainer.protocol import Owner, Phase

REPETITIONS = {2: 7, 32: 3, 64: 3}
SLEEP = "import os\nos.execvp('sleep', ['sleep', '600'])\n"
_generations = itertools.count(1)


def ours(site: Site) -> tuple[float, float]:
    """Seconds until every node's training runs, and processor seconds of this process."""
    plan = site.plan()
    handle = site.handle(plan, next(_generations))
    began, cpu = time.monotonic(), cpu_seconds()

    async def start() -> dict[str, Any]:
        async with NodesHook.for_plan(plan).group() as group:
            return await site.gang(plan, group).start(handle, None)

    states = in_loop(start)
    took = time.monotonic() - began, cpu_seconds() - cpu
    assert all(state.phase == Phase.RUNNING and state.child for state in states.values())

    async def end() -> None:
        async with NodesHook.for_plan(plan).group() as group:
            gang = site.gang(plan, group)
            await gang.stop(handle.job_id, "measured")
            await gang.wait_until_over(handle.job_id)

    in_loop(end)
    return took


def command(site: Site, name: str) -> str:
    """What a shell runs to start the same training detached."""
    plan = site.plan()
    spec = job_spec(plan, next(n for n in plan.nodes if n.name == name), job_id="peer", owner=Owner(), staged={})
    words = ["env", *(f"{key}={value}" for key, value in spec.env.items()), *spec.argv]
    return f"setsid {shlex.join(words)} </dev/null >/dev/null 2>&1 & echo $!"


def asyncssh_peer(site: Site) -> tuple[float, float]:
    """``true``, then the detached start, on all nodes at once over new connections."""
    commands = {node.name: command(site, node.name) for node in site.nodes}
    began, cpu = time.monotonic(), cpu_seconds()

    async def one(node: Any) -> int:
        async with await connect(node) as connection:
            await connection.run("true", check=True)
            return int(str((await connection.run(commands[node.name], check=True)).stdout))

    async def all_of_them() -> list[int]:
        import asyncio

        return await asyncio.gather(*(one(node) for node in site.nodes))

    pids = in_loop(all_of_them)
    took = time.monotonic() - began, cpu_seconds() - cpu
    end(pids)
    return took


def pdsh_peer(site: Site) -> tuple[float, float]:
    """The same with pdsh and OpenSSH's client: one command, since a second would log in again."""
    first = site.nodes[0]
    known = site.packages.parent / "known_hosts"
    known.write_text("".join(f"[{node.address}]:{node.port} {node.host_key}\n" for node in site.nodes))
    options = f"-F /dev/null -p {first.port} -i {first.client_key} -o UserKnownHostsFile={known} -o BatchMode=yes"
    environment = {**os.environ, "PDSH_SSH_ARGS_APPEND": options, "PDSH_RCMD_TYPE": "ssh"}
    hosts = ",".join(node.address for node in site.nodes)
    began = time.monotonic()
    done = subprocess.run(
        ["pdsh", "-N", "-l", first.user, "-f", "64", "-w", hosts, command(site, first.name)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    took = time.monotonic() - began
    pids = [int(line) for line in done.stdout.split()]
    assert len(pids) == len(site.nodes), done.stderr
    end(pids)
    return took, 0.0


def end(pids: list[int]) -> None:
    for pid in pids:
        assert Path(f"/proc/{pid}").exists(), "the peer's training did not start"
        kill(pid, 9)


def fanout(count: int) -> Callable[[], list[Row]]:
    def case() -> list[Row]:
        with loopback(count) as site:
            run_program(site, SLEEP)
            began = time.monotonic()
            ours(site)  # ships the agent
            first = time.monotonic() - began
            peers = {"asyncssh": asyncssh_peer} | ({"pdsh": pdsh_peer} if shutil.which("pdsh") else {})
            figures: dict[str, list[tuple[float, float]]] = {name: [] for name in ("ours", *peers)}
            for _ in range(REPETITIONS[count]):
                figures["ours"].append(ours(site))
                for name, peer in peers.items():
                    figures[name].append(peer(site))
        wall = {name: statistics.median(seconds for seconds, _ in pairs) for name, pairs in figures.items()}
        cpu = {name: statistics.median(seconds for _, seconds in pairs) for name, pairs in figures.items()}
        note = f"median of {REPETITIONS[count]}"
        rows = [
            Row(f"{count} nodes: submit to last training", wall["ours"], wall[name], note=f"{note}; peer: {name}")
            for name in peers
        ]
        rows.append(Row("  controller's processor time", cpu["ours"], cpu["asyncssh"], note="peer: asyncssh"))
        if "pdsh" not in peers:
            rows.append(Row("  pdsh is not installed (Debian package pdsh)", 0.0))
        return [*rows, Row("  the very first start, with its end, shipping the agent", first)]

    return case


if __name__ == "__main__":
    cases = {str(count): fanout(count) for count in REPETITIONS}
    sys.exit(run_cases("benchmarks.fanout", cases, __doc__ or ""))
