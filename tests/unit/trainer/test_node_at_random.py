"""One node under everything at once: starts, commits, stops, cancels and kill -9, at random, with the truth from /proc.

``NODE_SEED`` repeats a run and ``NODE_SECONDS`` makes it longer.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer import jobs, process, protocol, records, start, stop
from trainer.protocol import (
    CancelRequest,
    CommitRequest,
    JobSpec,
    JobsRequest,
    Owner,
    Phase,
    StartReply,
    StartRequest,
    StartResult,
    StopRequest,
)

SECONDS = float(os.environ.get("NODE_SECONDS", "10"))
ABREAST = 4  # actions at the same time
LATE_S = 0.5  # that a training may begin after the reply to its cancel: it was committed before, on a busy machine
TICKS = os.sysconf("SC_CLK_TCK")

#: Says when it began, as the kernel knows it, and ends, or not, with or without a child in a session of its own.
TRAINING = """
import json, os, signal, subprocess, sys, time
job, witness, seconds, stubborn = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4] == 'True'
ticks = int(open('/proc/self/stat').read().rpartition(')')[2].split()[19])
line = json.dumps({'job': job, 'ticks': ticks}) + chr(10)
os.write(os.open(witness, os.O_WRONLY | os.O_CREAT | os.O_APPEND), line.encode())
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(['env', '-i', 'setsid', 'sleep', '600'])
time.sleep(seconds)
"""


def boot_time() -> float:
    """Seconds since boot: the clock of the start times in /proc."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Chaos:
    """Does things to a node and knows what must be true of it."""

    def __init__(self, node, seed: int, witness: Path) -> None:
        self.node, self.random, self.witness = node, random.Random(seed), witness  # noqa: S311 - to be repeated
        self.specs: dict[str, JobSpec] = {}
        self.cancelled: dict[tuple[str, int], float] = {}  # task and try → when the reply came
        self.tries = dict.fromkeys(("one", "two", "three"), 1)
        self.results: list[str] = []
        self.failed: dict[str, str] = {}  # job id → why its start failed; such a job may be started again

    # -- what is done -----------------------------------------------------------------------------------------

    def new_spec(self) -> JobSpec:
        task = self.random.choice(list(self.tries))
        job_id = f"{task}-{len(self.specs)}"
        arguments = [job_id, str(self.witness), self.random.choice(["0.3", "1", "600"]), self.random.random() < 0.3]
        spec = JobSpec(
            job_id,
            [sys.executable, "-S", "-E", "-c", TRAINING, *map(str, arguments)],
            owner=self.owner(task, self.random.choice([0, 0, 0, -1])),
            gpus=self.random.choice([None, [0], [1], [2], [0, 1], [1, 2]]),
            grace_s=self.random.choice([0.0, 0.3]),
        )
        self.specs[job_id] = spec
        return spec

    def owner(self, task: str, step: int = 0) -> Owner:
        return Owner("dag", "run", task, try_number=max(1, self.tries[task] + step))

    def some_spec(self) -> JobSpec:
        newest = list(self.specs.values())[-6:]
        return self.random.choice(newest) if newest and self.random.random() < 0.5 else self.new_spec()

    def action(self):
        """One thing to do, decided now and done by a thread of its own."""
        kinds = {"start": 5, "prepare": 6, "commit": 6, "stop": 2, "cancel": 1, "killed start": 2}
        kinds.update({"kill supervisor": 2, "kill child": 1})
        kind = self.random.choices(list(kinds), list(kinds.values()))[0]
        workdir = self.node.workdir
        if kind in ("start", "prepare", "killed start"):
            hold_s = {"start": 0.0, "killed start": 1.0}.get(kind, self.random.choice([0.2, 1.0, 5.0]))
            request = StartRequest(workdir, self.some_spec(), hold_s)
            return kind, self.start, (request, self.random.uniform(0, 0.4) if kind == "killed start" else None)
        if kind == "cancel":
            task = self.random.choice(list(self.tries))
            owner, self.tries[task] = self.owner(task), self.tries[task] + 1
            return kind, self.cancel, (CancelRequest(workdir, owner, grace_s=self.random.choice([None, 0.0])),)
        job_id = self.random.choice(list(self.specs)[-5:] or ["none"])
        if kind == "commit":
            return kind, start.commit, (CommitRequest(workdir, job_id),)
        if kind == "stop":
            return kind, stop.stop, (StopRequest(workdir, job_id, wait_s=self.random.choice([0.0, 0.4])),)
        return kind, self.kill, (kind == "kill child",)

    def start(self, request: StartRequest, killed_after: float | None) -> None:
        owner = request.spec.owner
        refused = any(task == owner.task_id and owner.try_number <= last for task, last in self.cancelled)
        if killed_after is not None:
            with self.node.popen("start", request) as starter:
                time.sleep(killed_after)
                starter.kill()
            return
        done = self.node.verb("start", request)  # a process of its own: it forks
        assert done.returncode == 0, done.stderr
        reply = protocol.loads(StartReply, done.stdout)
        self.results.append(reply.result)
        if reply.result == StartResult.FAILED:
            self.failed[request.spec.job_id] = str(reply.error)
        assert not refused or reply.result == StartResult.CANCELLED

    def cancel(self, request: CancelRequest) -> None:
        stop.cancel(request)
        self.cancelled[request.owner.task_id, request.owner.try_number] = boot_time()

    def kill(self, child: bool) -> None:
        states = jobs.jobs(JobsRequest(self.node.workdir)).jobs
        found = [state.child if child else state.supervisor for state in states if state.phase in Phase.ALIVE]
        if any(found):
            process.send_signal(next(identity for identity in found if identity), signal.SIGKILL)

    # -- what must be true --------------------------------------------------------------------------------------

    def check(self, kinds: set[str], started: bool) -> None:
        seen = process.markers(self.node.workdir)
        alive = {job_id for identity, job_id in seen.items() if process.is_alive(identity)}
        for one, two in itertools.combinations(sorted(alive), 2):
            assert not self.overlap(one, two), f"{one} and {two} train on the same GPUs"
        for job in records.known_jobs(self.node.paths):
            state = records.read_state(job)
            if state is not None and state.phase in Phase.ENDED:
                left = {identity for identity, job_id in seen.items() if job_id == job.job_id}
                assert not any(process.is_alive(identity) for identity in left), f"{job.job_id} ended, but runs"
        if started and "kill supervisor" not in kinds:
            orphans = {job_id for job_id in alive if not process.is_alive(self.supervisor_of(job_id))}
            running = {job_id for job_id in orphans if process.marked(self.node.workdir, job_id)}
            assert not running, f"{running} train without a supervisor"

    def supervisor_of(self, job_id: str):
        state = records.read_state(self.node.paths.job(job_id))
        return state.supervisor if state else None

    def overlap(self, one: str, two: str) -> bool:
        first, second = self.specs[one].gpus, self.specs[two].gpus
        return first is None or second is None or bool(set(first) & set(second))

    def check_witnesses(self) -> int:
        lines = [json.loads(line) for line in self.witness.read_text().splitlines()] if self.witness.exists() else []
        begun = [line["job"] for line in lines]
        twice = {job_id for job_id in begun if begun.count(job_id) > 1}
        assert not twice - set(self.failed), f"{twice} trained twice"
        for line in lines:
            owner = self.specs[line["job"]].owner
            for (task, last), at in self.cancelled.items():
                if task == owner.task_id and owner.try_number <= last:
                    assert line["ticks"] / TICKS < at + LATE_S, f"{line['job']} began after its cancel"
        return len(lines)

    def cancelled_jobs_end(self) -> bool:
        """Whether no job of a cancelled try is alive."""
        for state in jobs.jobs(JobsRequest(self.node.workdir)).jobs:
            tries = [last for task, last in self.cancelled if task == state.owner.task_id]
            if state.phase in Phase.ALIVE and tries and state.owner.try_number <= max(tries):
                return False
        return True


@pytest.mark.timeout(SECONDS * 10 + 120)
def test_whatever_happens_no_gpu_has_two_trainings_and_no_cancelled_try_runs(node, tmp_path):
    seed = int(os.environ.get("NODE_SEED", random.SystemRandom().randrange(10**6)))
    print(f"NODE_SEED={seed}")  # noqa: T201 - shown when the test fails
    chaos = Chaos(node, seed, tmp_path / "witness")
    end = time.monotonic() + SECONDS
    done: list[str] = []
    with ThreadPoolExecutor(ABREAST) as pool:
        while time.monotonic() < end:
            actions = [chaos.action() for _ in range(ABREAST)]
            before, failed = len(chaos.results), len(chaos.failed)
            for running in [pool.submit(function, *arguments) for _, function, arguments in actions]:
                running.result()
            kinds = [kind for kind, *_ in actions]
            done += kinds
            assert len(chaos.failed) == failed or "kill supervisor" in kinds, chaos.failed
            chaos.check(set(kinds), StartResult.STARTED in chaos.results[before:])
    node.until(chaos.cancelled_jobs_end)
    for job in records.known_jobs(node.paths):
        assert node.stop(job.job_id, grace_s=0.0).stopped
    assert not node.alive()
    trained = chaos.check_witnesses()
    assert node.start("pass", "last").result == StartResult.STARTED  # every lease is free
    print(f"{len(done)} actions, {trained} trainings:", {kind: done.count(kind) for kind in sorted(set(done))})  # noqa: T201
    print({result: chaos.results.count(result) for result in sorted(set(chaos.results))})  # noqa: T201
