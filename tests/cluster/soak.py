"""Runs under faults at random moments, driven by the train operator itself, judged from /proc and the nodes' files.

``python -m tests.cluster.soak --runs 200 --seed 7`` prints the seed and every run; ``--only 17`` repeats one of them,
and ``--hosts`` pulls cables and powers machines off too (root). Training processes carry a witness of their own: each
holds a lock in a folder of its node while it lives, and looks whether another job's is held, so that two trainings on
one node are noticed however short they overlap.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.airflow.home import HOME  # noqa: F401 - before anything here imports airflow

# ruff: isort: split
from airflow.sdk.exceptions import TaskDeferred

from local import netns
from local.nodes import LocalNode, make_nodes
from local.processes import free_port
from swift_provider.exceptions import TrainingError, TrainingStopped
from swift_provider.hooks import endpoint
from swift_provider.hooks.cancel import cancel_until_heard
from swift_provider.hooks.nodes import NodesHook
from swift_provider.operators import train as train_module
from swift_provider.operators.gang import Gang
from swift_provider.operators.train import STATE_KEY, TrainOperator
from swift_provider.planning.gang import cancel_reason
from swift_provider.planning.plan import LaunchPlan
from swift_provider.retry import TrainingRetryPolicy
from swift_provider.triggers import follower as follower_module
from swift_provider.triggers import gang as trigger_module
from swift_provider.triggers.follower import GangFollower
from swift_provider.triggers.gang import GangTrigger
from swift_provider.triggers.logs import LogCursor
from tests.cluster import stand_in
from tests.cluster.sites import Site, host_site, kill, loopback_site
from trainer import protocol
from trainer.files import is_locked
from trainer.paths import NodePaths
from trainer.process import descendants, node_key
from trainer.protocol import MARKER, JobSpec, JobState, Owner, Phase

#: One run with everything that happens to it (seconds).
LIMIT_S = 120.0
#: That a training may begin after the reply to its cancel: its processes were being started already.
LATE_S = 1.0
#: From a cancel that was heard to the last process gone: the grace of the plan, and a busy machine.
GONE_S = 15.0
SAVE_STEPS = 4
#: The second half of a pair of ``cut``/``heal``, ``poweroff``/``boot``.
KILLS_THE_GANG = frozenset({"kill supervisor", "kill launcher", "kill rank", "poweroff", "kill host"})

LOOPBACK_FAULTS = {
    "kill ssh sessions": 4,
    "restart sshd": 2,
    "kill supervisor": 3,
    "kill launcher": 2,
    "kill rank": 3,
    "stop": 2,
    "cancel and clear": 3,
    "cancel": 1,
    "restart follower": 4,
}
HOST_FAULTS = {**LOOPBACK_FAULTS, "cut": 6, "poweroff": 4, "kill host": 3}
del HOST_FAULTS["restart sshd"]

_WITNESS = '''\
"""Imported by every training process at its start: see tests/cluster/soak.py."""
import fcntl, os, sys

def announce(folder):
    node, _, job = os.environ.get({marker!r}, "").partition("/")
    if not job:
        return
    place = os.uname().nodename + "-" + node
    folder = os.path.join(folder, place)
    os.makedirs(folder, exist_ok=True)
    name = job + "@%d-%s" % (os.getpid(), open("/proc/self/stat").read().rpartition(")")[2].split()[19])
    temporary = os.path.join(folder, "." + name)
    lock = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(temporary, os.path.join(folder, name))
    for other in os.listdir(folder):
        if "@" not in other or other.startswith(".") or other.partition("@")[0] == job:
            continue
        probe = os.open(os.path.join(folder, other), os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            with open(os.path.join(folder, "..", "overlaps"), "a") as stream:
                stream.write(place + ": " + name + " began while " + other + " lived\\n")
        finally:
            os.close(probe)

announce({folder!r})
'''


class ControllerDied(BaseException):
    """What a controller's death looks like from inside: nothing more is said to any node."""


@dataclass(frozen=True)
class Death:
    """When a controller dies while it starts a gang: ``after`` so many seconds, or between prepare and commit."""

    after: float | None = None
    before_commit: bool = False


_death: ContextVar[Death | None] = ContextVar("death", default=None)


class MortalGang(Gang):
    """The operator's gang, in a controller that may die."""

    async def start(self, handle: Any, resume: Any) -> dict[str, JobState]:
        death = _death.get()
        if death is None or death.after is None:
            return await super().start(handle, resume)
        try:
            async with asyncio.timeout(death.after):
                return await super().start(handle, resume)
        except TimeoutError:
            raise ControllerDied from None

    async def _commit(self, *arguments: Any) -> dict[str, JobState]:
        death = _death.get()
        if death is not None and death.before_commit:
            raise ControllerDied
        return await super()._commit(*arguments)


class Store:
    """Airflow's task state as one try of the task sees it: a try that was cancelled cannot write any more."""

    def __init__(self, run: Run, try_number: int) -> None:
        self.run, self.try_number = run, try_number

    def get(self, key: str) -> Any:
        return self.run.values.get(key)

    def set(self, key: str, value: Any) -> None:
        if self.try_number <= self.run.cancelled_try:
            raise ControllerDied
        self.run.values[key] = value


class SoakTrigger(GangTrigger):
    """The real trigger; what it would write to Airflow's log and XCom goes to the run."""

    run_of: Run

    async def _write_log(self, lines: dict[str, list[str]]) -> None:
        for name, new in lines.items():
            self.run_of.lines[self.job_id, name] += new

    async def _publish(self, follower: GangFollower) -> None:
        self.run_of.publish(self.job_id, follower)

    async def _last_progress(self) -> dict[str, Any]:
        return {"log_offsets": self.run_of.offsets.get(self.job_id, {})}


class Run:
    """One DAG run's train task over its tries, until it succeeds, is cancelled, or its retries are over."""

    def __init__(self, trial: Trial, name: str, plan: LaunchPlan, deaths: list[Death], abreast: list[int]) -> None:
        self.trial, self.name, self.plan, self.deaths, self.abreast = trial, name, plan, deaths, abreast
        self.random = random.Random(f"{trial.key} {name}")  # noqa: S311 - to be repeated
        self.values: dict[str, Any] = {}
        self.try_number, self.cancelled_try = 1, 0
        self.for_good = self.expired = False
        self.clears = 0
        self.outcome = ""
        self.errors: list[str] = []
        self.lines: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.offsets: dict[str, dict[str, int]] = {}
        self.published: dict[tuple[str, str], int] = {}
        self.drained: set[str] = set()
        self.handles: dict[str, dict[str, Any]] = {}
        self.heard: list[tuple[int, str, float]] = []  # try, node, time of the reply
        self.restarts = 0
        self.repeated = 0
        self._restart = threading.Event()
        self._zombies: list[threading.Thread] = []

    # -- what Airflow does --------------------------------------------------------------------------------------

    def drive(self) -> None:  # noqa: C901 - one branch for each way in which a try ends
        """The scheduler's part."""
        trigger: GangTrigger | None = None
        while time.monotonic() < self.trial.limit:
            try:
                if trigger is None:
                    trigger = self._execute()
                # None: it has ended well before, or was cancelled meanwhile.
                event = None if trigger is None else self._follow(trigger)
                if self.try_number <= self.cancelled_try:
                    if self.for_good:
                        self.outcome = "did not end" if self.expired else "cancelled"
                        return
                    time.sleep(self.random.uniform(0.0, 2.0))
                    self.try_number, trigger = self.try_number + 1, None
                    continue
                if event is not None:
                    self._operator().execute_complete(self._context(), json.loads(json.dumps(event)))
                self.outcome = "success"
                return
            except TaskDeferred as deferred:  # from execute_complete: the end was meant for an earlier try
                trigger = deferred.trigger
                self.note("superseded")
            except ControllerDied:
                self._next_try("ControllerDied")
                trigger = None
            except TrainingError as error:
                self.note(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
                decision = TrainingRetryPolicy().evaluate(error, self.try_number, 99)
                if decision.action.value != "retry":
                    if not (isinstance(error, TrainingStopped) and self.clears):
                        self.outcome = f"failed: {type(error).__name__}: {error}"
                        return
                    self.clears -= 1
                self._next_try("")
                trigger = None
        self.outcome = "did not end"

    def _next_try(self, word: str) -> None:
        if word:
            self.note(word)
        self.try_number += 1
        time.sleep(self.random.uniform(0.1, 0.8))

    def note(self, text: str) -> None:
        self.errors.append(f"try {self.try_number}: {text}")

    def _context(self) -> Any:
        ti = SimpleNamespace(
            dag_id=self.plan.dag_id,
            run_id=self.plan.run_id,
            task_id="train",
            map_index=-1,
            try_number=self.try_number,
            xcom_push=lambda *_: None,
        )
        return {"ti": ti, "task_state_store": Store(self, self.try_number)}

    def _operator(self) -> TrainOperator:
        return TrainOperator(task_id="train", plan=self.plan.model_dump(mode="json"), poll_interval=0.2)

    def _execute(self) -> GangTrigger | None:
        """One try up to its deferral, by one or several controllers; one whose try is cancelled is left behind."""
        answers: list[Any] = []
        count = self.abreast.pop(0) if self.abreast else 1
        context = self._context()

        def control(death: Death | None) -> None:
            _death.set(death)
            try:
                self._operator().execute(context)
                answers.append(None)
            except TaskDeferred as deferred:
                answers.append(deferred.trigger)
            except BaseException as error:
                answers.append(error)

        death = self.deaths.pop(0) if self.deaths else None
        threads = [self.trial.thread(control, death if index == 0 else None) for index in range(count)]
        while any(thread.is_alive() for thread in threads):
            if self.try_number <= self.cancelled_try:
                self._zombies += threads
                return None
            time.sleep(0.02)
        self.remember_handle()
        for answer in answers:
            if answer is None or isinstance(answer, GangTrigger):
                return answer
        raise answers[0]

    def remember_handle(self) -> None:
        value = self.values.get(STATE_KEY)
        if value:
            self.handles[value["job_id"]] = value

    def _follow(self, trigger: GangTrigger) -> dict[str, Any] | None:
        """The trigger's one event, over restarts of the triggerer; ``None`` when the task was cancelled."""
        while True:
            mine = SoakTrigger(**trigger.serialize()[1])
            mine.run_of = self
            event = asyncio.run(self._follow_once(mine))
            if event is not None:
                if event["status"] == "ended":
                    self.drained.add(mine.job_id)
                return event
            for key, count in self.published.items():  # what a crash repeats in Airflow's log: at most one poll
                self.repeated += len(self.lines[key]) - count
                del self.lines[key][count:]
            if self.try_number <= self.cancelled_try:
                return None
            self.restarts += 1

    async def _follow_once(self, trigger: SoakTrigger) -> dict[str, Any] | None:
        async def first() -> dict[str, Any]:
            async for event in trigger.run():
                return dict(event.payload)
            raise AssertionError("no event")

        task = asyncio.create_task(first())
        while not task.done():
            await asyncio.wait([task], timeout=0.05)
            if self._restart.is_set() or self.try_number <= self.cancelled_try or time.monotonic() > self.trial.limit:
                self._restart.clear()
                break
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await trigger.cleanup()
            if time.monotonic() > self.trial.limit:
                self.cancelled_try, self.for_good, self.expired = self.try_number, True, True
            return None
        await trigger.cleanup()
        return task.result()

    def publish(self, job: str, follower: GangFollower) -> None:
        self.offsets[job] = dict(follower.offsets)
        for name in follower.views:
            self.published[job, name] = len(self.lines[job, name])

    # -- what users do --------------------------------------------------------------------------------------------

    def restart_follower(self) -> None:
        self._restart.set()

    def cancel(self, for_good: bool) -> None:
        """Mark failed (``for_good``), or clear: the listener's or the trigger's cancel, heard by every node."""
        number = self.try_number
        self.for_good = self.for_good or for_good
        self.cancelled_try = max(self.cancelled_try, number)
        self.trial.thread(self._cancel, number)

    def _cancel(self, number: int) -> None:
        async def work() -> None:
            async with NodesHook.for_plan(self.plan).group() as group:
                owner = self.owner(number)
                left = set(group.sessions)
                while left and time.monotonic() < self.trial.limit:
                    still = await cancel_until_heard(group, owner, cancel_reason(number), left, keep_trying=0.0)
                    self.heard += [(number, name, time.time()) for name in left - still]
                    left = still
                    await asyncio.sleep(0.2)

        asyncio.run(work())

    def owner(self, number: int) -> Owner:
        return Owner(self.plan.dag_id, self.plan.run_id, "train", -1, number, train_module.origin())

    def stop(self) -> None:
        """By hand on the nodes; the user clears the task afterwards."""
        handle = self.values.get(STATE_KEY)
        if not handle:
            return
        self.clears += 1

        async def work() -> None:
            async with NodesHook.for_plan(self.plan).group() as group:
                await Gang(self.plan, group, Owner(), {}).stop(handle["job_id"], "requested")

        asyncio.run(work())

    def join_zombies(self) -> None:
        for thread in self._zombies:
            thread.join(max(1.0, self.trial.limit - time.monotonic()))
            self.trial.check(not thread.is_alive(), f"{self.name}: a controller of a cancelled try does not end")


@dataclass
class Trial:
    """One site, one or two runs on it, some faults, and the judgement."""

    site: Site
    folder: Path
    key: str
    faults: dict[str, int]
    problems: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    samples: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.key)  # noqa: S311 - to be repeated
        self.began = time.monotonic()
        self.limit = self.began + LIMIT_S
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.witnesses = self.folder / "witnesses"
        (self.site.packages / "sitecustomize.py").write_text(_WITNESS.format(marker=MARKER, folder=str(self.witnesses)))
        self.witnesses.mkdir()

    def check(self, fine: bool, problem: str) -> None:
        if not fine:
            self.problems.append(problem)

    def thread(self, work: Callable[..., None], *args: Any) -> threading.Thread:
        """``work`` where the nodes can be reached from; an exception in it is a problem of the trial."""

        def body() -> None:
            try:
                if self.site.cluster is not None:
                    netns._enter_network(self.site.cluster._namespace("controller"))
                work(*args)
            except BaseException as error:
                if not self._over.is_set():
                    self.problems.append(f"{work.__name__}: {''.join(traceback.format_exception(error))[-3000:]}")

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    # -- the plan of the trial ----------------------------------------------------------------------------------

    def make_runs(self) -> list[Run]:
        names = [node.name for node in self.site.nodes]
        wanted = self.random.randint(2, len(names))
        runs = [self._make_run("run", self.random.sample(names, wanted))]
        if self.random.random() < 0.3:
            other = self.random.sample(names, self.random.randint(1, len(names)))
            runs.append(self._make_run("rival", other))
        return runs

    def _make_run(self, name: str, nodes: list[str]) -> Run:
        chosen = [next(node for node in self.site.nodes if node.name == wanted) for wanted in nodes]
        site = replace(self.site, nodes=chosen, port=free_port())
        script = {"step_s": self.random.choice([0.03, 0.06, 0.1]), "escape": self.random.random() < 0.2}
        script["ignore_term"] = self.random.random() < 0.2
        slots = self.random.choice([1, 1, 2])
        if slots == 1 and self.random.random() < 0.3:
            script |= {"dump": str(self._dump()), "dump_pause_s": 0.01}
        plan = site.plan(
            name,
            max_steps=self.random.choice([6, 20, 40]),
            save_steps=SAVE_STEPS,
            slots=slots,
            grace=self.random.choice([0.5, 1.5]),
            **stand_in.arguments(**script),
        )
        deaths = []
        for _ in range(self.random.choice([0, 0, 0, 1, 1, 2])):
            early = self.random.random() < 0.5
            deaths.append(Death(before_commit=True) if early else Death(after=self.random.uniform(0.02, 2.0)))
        return Run(self, name, plan, deaths, [self.random.choice([1, 1, 1, 2, 4]) for _ in range(2)])

    def _dump(self) -> Path:
        path = self.folder / "dump"
        if not path.exists():
            parts = [
                "训练损失下降，学习率 1e-4\n".encode() * 50,
                b"\r1%\r50%\r100%\n",
                b"\xff\xfe\x00 raw\n",
                b"y" * 90_000 + b"\n",
            ]
            path.write_bytes(b"".join(self.random.choice(parts) for _ in range(60)))
        return path

    def make_faults(self) -> list[tuple[str, bool, float]]:
        """Kind, whether it waits for a training to be seen first, and the seconds from then or from the beginning."""
        count = self.random.choice([0, 1, 1, 2, 2, 3, 4])
        kinds = self.random.choices(list(self.faults), list(self.faults.values()), k=count)
        deadly = 0
        faults = []
        for kind in kinds:
            deadly += kind in KILLS_THE_GANG
            if deadly > 2 and kind in KILLS_THE_GANG:  # three in a row without a checkpoint are rightly the end
                continue
            faults.append((kind, self.random.random() < 0.7, self.random.uniform(0.0, 2.0)))
        return faults

    # -- the trial ------------------------------------------------------------------------------------------------

    def go(self) -> None:
        runs = self.make_runs()
        faults = self.make_faults()
        for run in runs:
            self.tell(
                f"{run.name} on {','.join(node.name for node in run.plan.nodes)} abreast {run.abreast}"
                f" deaths {[(death.after and round(death.after, 2)) or 'commit' for death in run.deaths]}"
            )
        sampler = self.thread(self._sample)
        drivers = []
        for index, run in enumerate(runs):
            if index:
                time.sleep(self.random.uniform(0.0, 2.0))
            drivers.append(self.thread(run.drive))
        self._do_faults(faults, runs, drivers)
        for thread in drivers:
            thread.join(max(1.0, self.limit + 10 - time.monotonic()))
        for run in runs:
            run.join_zombies()
        self._end(runs)
        self._over.set()
        sampler.join()
        self._judge(runs)

    def tell(self, text: str) -> None:
        self.story.append(f"{time.monotonic() - self.began:6.2f} {text}")

    def _do_faults(
        self, faults: list[tuple[str, bool, float]], runs: list[Run], drivers: list[threading.Thread]
    ) -> None:
        for kind, waits, pause in faults:
            run = self.random.choice(runs)
            node = self.random.choice(run.plan.nodes).name
            until = time.monotonic() + 8.0
            while waits and time.monotonic() < until and not self.site.processes(node):
                time.sleep(0.05)
            time.sleep(pause)
            if not any(thread.is_alive() for thread in drivers):
                return
            did = self._fault(kind, run, node)
            self.tell(f"{kind} {run.name} {node}: {did}")

    def _fault(self, kind: str, run: Run, node: str) -> Any:
        if kind in ("cancel", "cancel and clear"):
            number = run.try_number
            run.cancel(for_good=kind == "cancel")
            return f"try {number}"
        if kind == "restart follower":
            return run.restart_follower()
        if kind == "stop":
            return self.thread(run.stop).join(30.0)
        if kind.startswith("kill ") and kind != "kill host":
            victims = self._victims(kind, node)
            for pid in victims:
                kill(pid, signal.SIGKILL)
            return victims
        return self._machine_fault(kind, node)

    def _machine_fault(self, kind: str, node: str) -> Any:
        cluster = self.site.cluster
        pause = self.random.uniform(0.2, 6.0)
        if cluster is None:
            server = next(item for item in self.site.nodes if item.name == node)
            server.stop()
            time.sleep(min(1.0, pause))
            server.start()
            return None
        if kind == "cut":
            cluster.cut(node)
            time.sleep(pause)
            cluster.heal(node)
            return f"{pause:.1f} s"
        (cluster.poweroff if kind == "poweroff" else cluster.kill)(node)
        time.sleep(pause / 3)
        cluster.boot(node)
        return f"{pause / 3:.1f} s"

    def _victims(self, kind: str, node: str) -> list[int]:
        if kind == "kill supervisor":
            return self.site.supervisors(node)
        if kind == "kill ssh sessions":
            return self._ssh_sessions(node)
        wanted = b"\0rank\0" if kind == "kill rank" else b"\0swift.cli.main\0"
        found = []
        for pid in self.site.processes(node):
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return self.random.sample(sorted(found), min(1, len(found)))

    def _ssh_sessions(self, node: str) -> list[int]:
        """Every sshd of the node but the one that listens."""
        if self.site.cluster is not None:
            everybody = self.site.cluster[node].processes()
        else:
            server = next(item for item in self.site.nodes if item.name == node).process
            everybody = [found.pid for found in descendants([server.pid])] if server else []
        found = []
        for pid in everybody:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sshd: root@"):
                    found.append(pid)
        return found

    # -- looking, while it runs --------------------------------------------------------------------------------

    def _sample(self) -> None:
        while not self._over.wait(0.15 if self.site.cluster is None else 0.3):
            for node in self.site.nodes:
                self.samples += 1
                jobs = self._jobs(self.site.processes(node.name))
                if len(jobs) < 2:
                    continue
                # One look is no instant: only what is alive before and after the other was seen lived beside it.
                again = [self._jobs(set(pids)) for pids in (*jobs.values(), *jobs.values())]
                alive = Counter(job for found in again for job in found)
                if sum(count == 2 for count in alive.values()) > 1:
                    self.problems.append(f"{node.name}: two trainings at once: {jobs}")

    @staticmethod
    def _jobs(pids: set[int]) -> dict[str, list[int]]:
        jobs = defaultdict(list)
        for pid in pids:
            with contextlib.suppress(OSError):
                for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if item.startswith(f"{MARKER}=".encode()):
                        jobs[item.decode().partition("/")[2]].append(pid)
        return dict(jobs)

    # -- the judgement ----------------------------------------------------------------------------------------

    def _end(self, runs: list[Run]) -> None:
        """A user's last cancel: afterwards nothing may be left. What was to be over by itself is looked at before."""
        before = {node.name: self.site.processes(node.name) for node in self.site.nodes}
        lost = {node.name for node in self.site.nodes if any(s.phase in Phase.ALIVE for s in self._states(node.name))}
        if all(run.outcome == "success" for run in runs):
            late = time.monotonic() + 5.0  # a controller that was left behind may still undo what it prepared
            while any(self.site.supervisors(node.name) for node in self.site.nodes) and time.monotonic() < late:
                time.sleep(0.1)
            for name, pids in before.items():
                self.check(not pids or name in lost, f"{name}: processes are left after success: {pids}")
        for run in runs:
            run.cancelled_try = max(run.cancelled_try, run.try_number)
            self.thread(run._cancel, run.try_number).join(60.0)
        until = time.monotonic() + GONE_S
        while time.monotonic() < until and any(self._alive(node.name) for node in self.site.nodes):
            time.sleep(0.1)

    def _alive(self, name: str) -> list[int]:
        return [*self.site.processes(name), *self.site.supervisors(name)]

    def _states(self, name: str) -> list[JobState]:
        states = []
        for path in self.site.folder(name).glob("jobs/*/state.json"):
            with contextlib.suppress(ValueError, OSError):
                states.append(protocol.loads(JobState, path.read_text()))
        return states

    def _judge(self, runs: list[Run]) -> None:
        overlaps = self.witnesses / "overlaps"
        self.check(not overlaps.exists(), overlaps.read_text() if overlaps.exists() else "")
        for run in runs:
            wanted = "cancelled" if run.for_good else "success"
            fine = run.outcome in (wanted, "success")
            self.check(fine, f"{run.name}: {run.outcome or 'no outcome'}, wanted {wanted}; {run.errors}")
            if run.outcome == "success":
                self._judge_steps(run)
            self._judge_log(run)
        for node in self.site.nodes:
            left = self._alive(node.name)
            self.check(not left, f"{node.name}: still there after the cancel: {left}")
            paths = NodePaths(str(self.site.folder(node.name)))
            self.check(not is_locked(paths.lease), f"{node.name}: the lease is still held")
            for state in self._states(node.name):
                self._judge_state(node.name, state)
                self._judge_cancelled(runs, node.name, state)

    def _judge_state(self, node: str, state: JobState) -> None:
        where = f"{node}: {state.job_id}"
        self.check(state.phase in Phase.ENDED, f"{where}: not ended: {state.phase}")
        self.check(state.ended_at is not None, f"{where}: no time of its end")
        self.check(not state.survivors, f"{where}: survivors {state.survivors}")
        reasons = (state.exit_code, state.signal, state.stop_reason, state.error)
        self.check(any(reason is not None for reason in reasons), f"{where}: ended, but nobody knows why: {state}")

    def _judge_cancelled(self, runs: list[Run], node: str, state: JobState) -> None:
        spec = protocol.loads(JobSpec, (self.site.folder(node) / "jobs" / state.job_id / "spec.json").read_text())
        run = next(run for run in runs if run.plan.run_id == spec.owner.run_id)
        began = [path.stat().st_ctime for path in (self.witnesses / self._place(node)).glob(f"{state.job_id}@*")]
        for number, name, when in run.heard:
            if name != node or spec.owner.try_number > number:
                continue
            late = [round(moment - when, 2) for moment in began if moment > when + LATE_S]
            self.check(
                not late, f"{node}: {state.job_id} of try {spec.owner.try_number} began {late} s after its cancel"
            )
            self.check(
                (state.ended_at or 0.0) < when + GONE_S,
                f"{node}: {state.job_id} ended {(state.ended_at or 0) - when:.1f} s after its cancel",
            )

    def _place(self, node: str) -> str:
        machine = node if self.site.cluster is not None else os.uname().nodename
        return f"{machine}-{node_key(self.site.workdirs[node])}"

    def _judge_log(self, run: Run) -> None:
        for (job, node), lines in run.lines.items():
            log = self.site.log(node, job) if (self.site.folder(node) / "jobs" / job / "log").exists() else b""
            offset = run.offsets.get(job, {}).get(node, 0)
            self.check(
                lines == whole_lines(log[:offset]), f"{node}: {job}: the followed lines are not those of the log"
            )
            state = self.site.state(node, job)
            if job in run.drained and state.phase != Phase.LOST:
                self.check(offset == len(log), f"{node}: {job}: {len(log) - offset} bytes of the log were never read")

    def _judge_steps(self, run: Run) -> None:
        """Each generation goes on where the newest checkpoint of those before it is, and the last one to the end."""
        jobs = sorted(run.handles, key=lambda job: run.handles[job]["generation"])
        slots = run.plan.nodes[0].slots
        last, earlier = int(run.plan.args["max_steps"]), 0
        reached = defaultdict(int)
        for job in jobs:
            safe, begins = [], set()
            for node in run.plan.nodes:
                path = self.site.folder(node.name) / "jobs" / job / "log"
                steps = [int(n) for n in re.findall(rb"^step (\d+)/", path.read_bytes(), re.M)] if path.exists() else []
                counts = Counter(steps)
                begins |= {min(steps)} if steps else set()
                safe.append(max((n - 1 for n, count in counts.items() if count == slots), default=0))
                reached[node.name] = max([reached[node.name], *(n for n, c in counts.items() if c == slots)])
                wanted = list(range(min(steps), max(steps) + 1)) if steps else []
                self.check(sorted(counts) == wanted, f"{node.name}: {job}: steps are missing: {sorted(counts)}")
            resumed = run.handles[job]["resumed_step"]
            self.check(begins <= {resumed + 1}, f"{job}: begins at {begins}, its checkpoint is {resumed}")
            self.check(resumed >= earlier, f"{job}: resumed from {resumed}, but {earlier} was complete before")
            self.check(resumed % SAVE_STEPS == 0 and resumed <= last, f"{job}: resumed from step {resumed}")
            earlier = max(earlier, min(safe) // SAVE_STEPS * SAVE_STEPS)
        self.check(
            all(reached[node.name] == last for node in run.plan.nodes), f"{run.name}: steps end at {dict(reached)}"
        )


def whole_lines(log: bytes) -> list[str]:
    cursor = LogCursor()
    return cursor.feed(log) + cursor.flush()


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """Waits of production, shortened to what a run of seconds can show."""
    changes = [
        (follower_module, "STALE_HEARTBEAT_S", 3.0),
        (trigger_module, "FIRST_EVENT_AFTER_S", 0.0),
        (train_module, "Gang", MortalGang),
        (endpoint, "KEEPALIVE_S", 1),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


class Soak:
    """Nodes, and trials on them one after the other."""

    def __init__(self, folder: Path, seed: int, hosts: bool = False) -> None:
        self.folder, self.seed, self.hosts = folder, seed, hosts
        self.failures: list[int] = []
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Soak:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(hurried())
        if self.hosts:
            self.cluster = self._stack.enter_context(netns.HostCluster(self.folder / "hosts"))
            self.cluster.up(3)
        else:
            self.nodes: list[LocalNode] = make_nodes(self.folder / "loopback", 3, free_port("127.0.0.11"))
            for node in self.nodes:
                self._stack.callback(node.stop)
                node.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def trial(self, index: int) -> Trial:
        """Run number ``index`` of the seed; its problems are in the answer."""
        folder = self.folder / f"run-{index}"
        folder.mkdir()
        if self.hosts:
            for host in self.cluster.hosts:
                self.cluster.heal(host.name)
                if host.process is None:
                    self.cluster.boot(host.name)
            context = host_site(self.cluster, folder, 29500)
        else:
            context = loopback_site(self.nodes, folder, free_port())
        with context as site:
            for node in site.nodes:
                site.publish(node.name, extra={"conn_timeout": 2})
            trial = Trial(site, folder, f"{self.seed} {index}", HOST_FAULTS if self.hosts else LOOPBACK_FAULTS)
            try:
                trial.go()
            except Exception as error:
                trial.problems.append("".join(traceback.format_exception(error)))
        return trial


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.soak", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", type=int, action="append", help="repeat this run of the seed alone")
    parser.add_argument("--hosts", action="store_true", help="namespace hosts with cables and power; needs root")
    parser.add_argument("--keep", type=Path, help="keep every file of the nodes in this folder")
    options = parser.parse_args()
    if options.hosts and netns.why_not():
        parser.error(str(netns.why_not()))
    mode = " --hosts" if options.hosts else ""
    say(
        f"seed {options.seed}: python -m tests.cluster.soak --runs {options.runs} --seed {options.seed}{mode}",
    )
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, failed, samples = time.monotonic(), [], 0
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swift-soak-")))
        soak = stack.enter_context(Soak(folder, options.seed, options.hosts))
        for index in options.only or range(options.runs):
            trial = soak.trial(index)
            samples += trial.samples
            counts.update(re.sub(r"^ *[\d.]+ ", "", line).partition(" r")[0] for line in trial.story if ": " in line)
            verdict = "FAILED" if trial.problems else "ok"
            say(f"run {index}: {verdict}, {time.monotonic() - trial.began:.1f} s")
            if trial.problems:
                failed.append(index)
            if trial.problems or options.only:
                say("  " + "\n  ".join([*trial.story, *trial.problems]))
    say(
        f"{len(failed)} of {options.runs} runs failed {failed}; seed {options.seed}; {samples} looks at the nodes; "
        f"{dict(counts)}; {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}",
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
