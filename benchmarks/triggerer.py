"""One event loop that follows 1000 runs of 8 nodes each, as a triggerer would, against one naive trigger per node.

The nodes are simulated: an object in a session's place answers ``read`` from memory after a few milliseconds, with a
state that moves on and a line of log in each poll. Encryption, Airflow's database and the task logs are not part of it.
Every run is looked at once in 5 s. The lag is how much later than asked a task wakes that sleeps 10 ms. The longest
blocking is the most processor time that the loop spent in one such lag: on a busy machine the lag itself also counts
the time that other programs took. Python's garbage collector runs in the loop's thread; a full collection goes through
every object of the process, those of Airflow's own modules included, so its share is shown apart, beside a full
collection in this process before anything is followed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

from benchmarks.harness import Row, run_cases
from benchmarks.nodes import cpu_seconds
from swift_provider.triggers.collector import spare_the_event_loop
from swift_provider.triggers.follower import GangFollower
from trainer import protocol
from trainer.process import identify
from trainer.protocol import JobState, Phase, Progress

RUNS, NODES, POLL_S, SECONDS = 1000, 8, 5.0, 30.0
LATENCY_S = 0.004
JITTER = random.Random(5)  # noqa: S311 - the same every time
LINE = b"{'loss': 1.2345, 'grad_norm': 0.98, 'learning_rate': 1e-4, 'epoch': 0.37}\n"
STATE = JobState(
    "job",
    Phase.RUNNING,
    supervisor=identify(1),
    child=identify(1),
    progress=Progress(step=10, max_steps=1000, loss=1.2),
)
TEMPLATE = protocol.dumps(STATE).replace('"heartbeat":0', '"heartbeat":%d').replace('"heartbeat": 0', '"heartbeat": %d')


class Node:
    """A node's session: what it reads is made up."""

    workdir = "/srv/work"

    def __init__(self) -> None:
        self.looks = 0

    async def read(self, path: str, _offset: int = 0, _size: int = -1) -> bytes:
        """A state that moves on, or one more line of log."""
        await asyncio.sleep(LATENCY_S * JITTER.uniform(0.5, 1.5))
        if path.endswith("state.json"):
            self.looks += 1
            return (TEMPLATE % self.looks).encode()
        return LINE

    async def call(self, *_: Any) -> Any:
        """The agent is never asked while states move on."""
        raise AssertionError("no node is stale here")


async def one_run(polls: list[int]) -> None:
    group: Any = SimpleNamespace(sessions={f"node{index}": Node() for index in range(NODES)})
    follower = GangFollower(group, "job")
    await asyncio.sleep(JITTER.uniform(0, POLL_S))
    while True:
        await follower.poll()
        polls.append(NODES)
        await asyncio.sleep(POLL_S)


async def naive(polls: list[int]) -> None:
    """What one writes first: a trigger per node that reads, parses, splits and sleeps."""
    node, offset = Node(), 0
    await asyncio.sleep(JITTER.uniform(0, POLL_S))
    while True:
        state = json.loads(await node.read("state.json"))
        data = await node.read("log", offset)
        offset += len(data)
        data.decode().splitlines()
        assert state["phase"] == Phase.RUNNING
        polls.append(1)
        await asyncio.sleep(POLL_S)


class Collector:
    """Processor time of this thread that Python's garbage collector has taken so far (seconds)."""

    def __init__(self) -> None:
        self.spent = self._began = 0.0

    def __call__(self, phase: str, _info: dict[str, int]) -> None:
        """A callback of :mod:`gc`."""
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.spent += time.thread_time() - self._began


def full_collection() -> float:
    """Milliseconds of processor time for one."""
    gc.collect()
    began = time.thread_time()
    gc.collect()
    return 1000 * (time.thread_time() - began)


async def measure(work: list[Coroutine[Any, Any, None]], polls: list[int]) -> tuple[float, ...]:
    """p50, p99 and longest lag, longest blocking with and without the collector (ms), % of a core, looks per second."""
    tasks = [asyncio.create_task(item) for item in work]
    await asyncio.sleep(2 * POLL_S)
    lags, blocks, own = [], [], []
    collector = Collector()
    gc.callbacks.append(collector)
    began, cpu, before = time.monotonic(), cpu_seconds(), sum(polls)
    while time.monotonic() - began < SECONDS:
        asked, spent, collected = time.monotonic() + 0.01, time.thread_time(), collector.spent
        await asyncio.sleep(0.01)
        lags.append(1000 * (time.monotonic() - asked))
        blocks.append(1000 * (time.thread_time() - spent))
        own.append(blocks[-1] - 1000 * (collector.spent - collected))
    gc.callbacks.remove(collector)
    took = time.monotonic() - began
    busy, rate = 100 * (cpu_seconds() - cpu) / took, (sum(polls) - before) / took
    failed = [task for task in tasks if task.done()]
    assert not failed, failed[0].exception()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    cuts = statistics.quantiles(lags, n=100)
    return cuts[49], cuts[98], max(lags), max(blocks), max(own), busy, rate


def follow() -> list[Row]:
    before, found = full_collection(), []
    spare_the_event_loop()
    for runner, count in ((one_run, RUNS), (naive, RUNS * NODES)):
        polls: list[int] = []
        found.append(asyncio.run(measure([runner(polls) for _ in range(count)], polls)))
    names = (
        "lag, p50",
        "lag, p99",
        "lag, longest",
        "longest blocking",
        "  without the collector",
        "processor",
        "looks at a node",
    )
    units = ("ms", "ms", "ms", "ms", "ms", "% core", "/s")
    note = f"{RUNS} runs x {NODES} nodes, poll {POLL_S:g} s, {SECONDS:g} s; peer: a naive trigger per node"
    rows = [
        Row(name, our, peer, unit, note) for name, unit, our, peer in zip(names, units, found[0], found[1], strict=True)
    ]
    return [*rows, Row("a full collection, nothing followed", before, unit="ms")]


if __name__ == "__main__":
    sys.exit(run_cases("benchmarks.triggerer", {"follow": follow}, __doc__ or ""))
