"""Pairs of nodes that train a stand-in for ms-swift, a watch over /proc, and the faults that tests cause.

Each pair is two work folders behind the laptop's two SSH servers, with a recipe, a cluster and a port of its own, so
that runs of different pairs never meet. The stand-in takes its first step about a second after its start.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from local.airflow import AirflowClient
from local.laptop import PROJECT, Laptop
from local.processes import end_group, free_port
from swift_provider.planning.names import job_id, run_key
from tests.cluster import stand_in
from tests.cluster.sites import is_supervisor
from trainer.process import all_pids, node_key, read_environ
from trainer.protocol import MARKER, JobSpec, JobState, Owner, Phase, StartReply, StartRequest, dumps, loads

DAG = "swift_train"
NODES = ("node1", "node2")
#: Recipes by name, with the work folder that each of them trains in and what it says beyond the others.
PAIRS: dict[str, dict[str, Any]] = {
    "stand-in": {},
    "stand-in-2": {},
    "stand-in-3": {},
    "stand-in-4": {},
    "stand-in-5": {},
    "stand-in-6": {},
    "stand-in-hurried": {"max_runtime": 45},
    "stand-in-nights": {"checkpoints": {"backup": "oss://swift-demo/stand-in-nights", "keep_last": 1, "keep_runs": 1}},
}
#: Processes of the stand-in on one node: its launcher and one rank.
PROCESSES = 2
GRACE_S = 3.0

Training = dict[str, dict[str, set[int]]]


# -- recipes and clusters -----------------------------------------------------------------------------------------


def write_configs(folder: Path) -> Path:
    """The project's own recipes and clusters, and those of the pairs, in ``folder``."""
    configs = folder / "configs"
    shutil.copytree(PROJECT / "include" / "configs", configs)
    packages = stand_in.install(folder / "stand-in-packages")
    local = yaml.safe_load((configs / "clusters" / "local.yaml").read_text())
    for name, more in PAIRS.items():
        cluster = {
            **local,
            "name": f"local-{name}",
            "nodes": [{**node, "workdir": str(folder / "nodes" / node["name"] / name)} for node in local["nodes"]],
            "shared_dir": str(folder / f"shared-{name}"),
            "master_port": free_port("127.0.0.11"),
            "env": {"PYTHONPATH": str(packages)},
        }
        recipe = {
            "name": name,
            "swift": {
                "args": {
                    "model": "stand/in",
                    "dataset": ["stand/in"],
                    "per_device_train_batch_size": 1,
                }
            },
            "cluster": f"local-{name}",
            "grace": GRACE_S,
            "checkpoints": {"backup": f"oss://swift-demo/{name}", "keep_last": 2},
            **more,
        }
        (folder / f"shared-{name}").mkdir()
        (configs / "clusters" / f"local-{name}.yaml").write_text(yaml.safe_dump(cluster))
        (configs / "recipes" / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    return configs


# -- looking at /proc -----------------------------------------------------------------------------------------------


def training_by_node() -> Training:
    """Every training process of this machine: node key → job id → pids. From /proc alone."""
    found: Training = defaultdict(lambda: defaultdict(set))
    prefix = f"{MARKER}=".encode()
    for pid in all_pids():
        for item in read_environ(pid):
            if item.startswith(prefix):
                key, _, job = item[len(prefix) :].decode().partition("/")
                found[key][job].add(pid)
    return found


def command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return []


class Watch(threading.Thread):
    """Looks at /proc all the while; a node that trains two jobs at the same moment is a broken promise."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        super().__init__(daemon=True)
        self.nodes = {node_key(str(pair.workdir(node))): f"{node} of {pair.name}" for pair in pairs for node in NODES}
        self.broken: list[str] = []
        self.looks = 0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.2):
            self.looks += 1
            found = training_by_node()
            for key, node in self.nodes.items():
                jobs = found.get(key, {})
                alive = {job: {pid for pid in pids if command_line(pid)} for job, pids in jobs.items()}
                both = sorted(job for job, pids in alive.items() if pids)
                if len(both) > 1:
                    self.broken.append(f"{node} trains {' and '.join(both)}")

    def stop(self) -> None:
        self._over.set()
        self.join()


# -- a pair of nodes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Two nodes, seen past everything that is tested. ``name`` is that of their recipe."""

    folder: Path
    name: str

    def workdir(self, node: str) -> Path:
        return self.folder / "nodes" / node / self.name

    @property
    def shared(self) -> Path:
        return self.folder / f"shared-{self.name}"

    def training(self) -> dict[str, dict[str, set[int]]]:
        """node → job id → pids, of nodes on which something trains."""
        found = training_by_node()
        named = {node: found.get(node_key(str(self.workdir(node)))) for node in NODES}
        return {node: dict(jobs) for node, jobs in named.items() if jobs}

    def pids(self, node: str) -> set[int]:
        return {pid for pids in self.training().get(node, {}).values() for pid in pids}

    def supervisors(self) -> dict[str, list[int]]:
        """node → pids of the supervisors that live there."""
        found: dict[str, list[int]] = {node: [] for node in NODES}
        for pid in all_pids():
            for node in NODES:
                if is_supervisor(pid, os.path.realpath(self.workdir(node))):
                    found[node].append(pid)
        return found

    def rank(self, node: str) -> int:
        """The pid of the node's rank."""
        [pid] = [pid for pid in self.pids(node) if "rank" in command_line(pid)]
        return pid

    def jobs(self, node: str) -> set[str]:
        """Every job that the node has ever heard of."""
        return {path.name for path in self.workdir(node).glob("jobs/*")}

    def state(self, node: str, job: str) -> JobState | None:
        with contextlib.suppress(OSError):
            return loads(JobState, (self.workdir(node) / "jobs" / job / "state.json").read_text())
        return None

    def is_empty(self) -> bool:
        """No process and no supervisor is left."""
        return not self.training() and not any(self.supervisors().values())

    def start_by_hand(self, node: str, job: str, owner: Owner, argv: list[str] | None = None) -> None:
        """A job that no run knows, through the agent on the node."""
        spec = JobSpec(job_id=job, argv=argv or ["sleep", "600"], owner=owner, grace_s=GRACE_S)
        self._agent("start", StartRequest(str(self.workdir(node)), spec))

    def stop_by_hand(self, node: str, job: str) -> None:
        request = {"workdir": str(self.workdir(node)), "job_id": job, "reason": "test is over", "wait_s": 20.0}
        self._agent("stop", request)

    @staticmethod
    def _agent(verb: str, request: Any) -> None:
        text = json.dumps(request) if isinstance(request, dict) else dumps(request)
        command = [sys.executable, "-m", "trainer", verb]
        done = subprocess.run(command, input=text.encode(), capture_output=True, check=True, cwd=PROJECT)
        if verb == "start":
            reply = loads(StartReply, done.stdout.decode())
            assert reply.result == "started", reply

    @contextlib.contextmanager
    def starts_are_blocked(self, node: str) -> Iterator[None]:
        """Every start on the node waits for its turn."""
        path = self.workdir(node) / "locks" / "start.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def end_everything(self) -> None:
        """For the end of the tests: supervisors first, then what they leave behind."""
        for pids in self.supervisors().values():
            for pid in pids:
                kill(pid)
        limit = time.monotonic() + 10
        while not self.is_empty() and time.monotonic() < limit:
            for node in NODES:
                for pid in self.pids(node):
                    kill(pid)
            time.sleep(0.05)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# -- a run ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run of ``swift_train`` on a pair."""

    client: AirflowClient
    pair: Pair
    run_id: str

    def trigger(self, max_steps: int, step_s: float = 0.1, save_steps: int = 20, **script: Any) -> Run:
        arguments = stand_in.arguments(step_s=step_s, **script)
        conf = {"recipe": self.pair.name, "max_steps": max_steps, "save_steps": save_steps, "extra_args": arguments}
        self.client.trigger(DAG, self.run_id, conf)
        return self

    # -- what Airflow says

    @property
    def state(self) -> str:
        return self.client.run_state(DAG, self.run_id)

    def task(self, task_id: str = "train") -> dict[str, Any]:
        return self.client.task_instances(DAG, self.run_id).get(task_id, {"state": None, "try_number": 0})

    def train(self) -> tuple[str, int]:
        """State and try number of the train task."""
        task = self.task()
        return task["state"], task["try_number"]

    def log(self, try_number: int = 1, task_id: str = "train") -> str:
        return self.client.task_log(DAG, self.run_id, task_id, try_number)

    def mark(self, state: str) -> None:
        path = f"/dags/{DAG}/dagRuns/{self.run_id}/taskInstances/train"
        self.client.request("PATCH", path, json={"new_state": state}).raise_for_status()

    def mark_run(self, state: str) -> None:
        self.client.set_run_state(DAG, self.run_id, state)

    def clear(self) -> None:
        body = {
            "dry_run": False,
            "dag_run_id": self.run_id,
            "task_ids": ["train"],
            "include_downstream": True,
            "only_failed": False,
            "reset_dag_runs": True,
        }
        self.client.request("POST", f"/dags/{DAG}/clearTaskInstances", json=body).raise_for_status()

    # -- what is on the nodes

    def job(self, generation: int = 1) -> str:
        return job_id(DAG, self.run_id, "train", -1, generation)

    def generations(self) -> dict[str, list[int]]:
        """node → the generations of this run that it has heard of."""
        prefix = self.job(1).removesuffix("1")
        return {
            node: sorted(int(job.removeprefix(prefix)) for job in self.pair.jobs(node) if job.startswith(prefix))
            for node in NODES
        }

    def steps(self) -> list[int]:
        """The steps in ``logging.jsonl``, in the order in which they were written."""
        path = self.pair.shared / "runs" / run_key(DAG, self.run_id) / "output" / "logging.jsonl"
        with contextlib.suppress(OSError):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            return [int(row["global_step/max_steps"].partition("/")[0]) for row in rows if "loss" in row]
        return []

    def segments(self) -> list[tuple[int, int]]:
        """First and last step of each unbroken ascent in ``logging.jsonl``: one for each generation that stepped."""
        found: list[tuple[int, int]] = []
        for step in self.steps():
            if found and step == found[-1][1] + 1:
                found[-1] = (found[-1][0], step)
            else:
                found.append((step, step))
        return found

    def newest_complete_checkpoint(self) -> int:
        """The step of the newest checkpoint to which both ranks have given their part."""
        found = (self.pair.shared / "runs" / run_key(DAG, self.run_id) / "output").glob("checkpoint-*")
        parts = ("rng_state_0.pth", "rng_state_1.pth", "trainer_state.json")
        whole = [path for path in found if all((path / part).exists() for part in parts)]
        return max((int(path.name.removeprefix("checkpoint-")) for path in whole), default=0)

    def gang(self, generation: int = 1) -> dict[str, list[int]] | None:
        """The supervisors of a whole gang of that generation, and of nothing else; ``None`` when there is none."""
        job, training = self.job(generation), self.pair.training()
        if {node: {name: len(pids) for name, pids in jobs.items()} for node, jobs in training.items()} != {
            node: {job: PROCESSES} for node in NODES
        }:
            return None
        supervisors = self.pair.supervisors()
        return supervisors if all(len(pids) == 1 for pids in supervisors.values()) else None

    def wait_for_gang(self, generation: int = 1, step: int = 1, timeout: float = 90) -> dict[str, list[int]]:
        """Waits until the generation has ``step`` behind it, and asserts that it alone trains, once on each node."""
        since = len(self.steps()) if self.gang(generation) is None else 0
        until(lambda: self.gang(generation) and self.steps()[since:] and self.steps()[-1] >= step, timeout, self.tell)
        gang = self.gang(generation)
        assert gang is not None, self.pair.training()
        return gang

    def wait_for_end(self, wanted: str = "success", timeout: float = 120) -> None:
        until(lambda: self.state in ("success", "failed"), timeout, self.tell)
        assert self.state == wanted, self.tell()

    def wait_until_followed(self, try_number: int = 1) -> None:
        """Waits until the task is deferred and its trigger has looked at the nodes."""
        until(lambda: self.train() == ("deferred", try_number), 60, self.tell)
        until(lambda: self.client.xcom(DAG, self.run_id, "train", "progress"), 60, self.tell)

    def tell(self) -> str:
        """For a failed assertion: all that is known, and the end of the newest log."""
        state, number = self.train()
        with contextlib.suppress(Exception):
            return (
                f"{self.run_id}: run {self.state}, train {state} at try {number}, generations {self.generations()}, "
                f"segments {self.segments()}, training {self.pair.training()}\n{self.log(max(1, number))[-3000:]}"
            )
        return f"{self.run_id}: train {state} at try {number}"


def until(
    condition: Callable[[], Any], timeout: float, tell: Callable[[], str] = lambda: "", pause: float = 0.2
) -> float:
    """Waits for a true value of ``condition``; returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout, f"waited {timeout:g} s in vain; {tell()}"
        time.sleep(pause)
    return time.monotonic() - began


def promised(seconds: float) -> float:
    """A promised time on this machine: longer by as much as it has more work than cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def stays(condition: Callable[[], Any], seconds: float, tell: Callable[[], str] = lambda: "") -> None:
    """Asserts that ``condition`` holds for that long."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        assert condition(), tell()
        time.sleep(0.25)


# -- Airflow's own processes ------------------------------------------------------------------------------------------


def kill_component(laptop: Laptop, name: str) -> None:
    """``kill -9`` of one component of Airflow; its children are left to themselves."""
    assert laptop.airflow is not None
    process = laptop.airflow.processes.pop(name)
    process.kill()
    process.wait()
    if name == "api-server":
        end_group(process.pid, 0.0)  # a worker that lives on would keep the port


def note(text: str) -> None:
    """A measured figure; ``pytest -s`` shows it."""
    sys.stderr.write(f"\n    {text}\n")


def lines_of(log: bytes) -> list[str]:
    """The lines of a job's log as the task log shows them."""
    return [line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", "replace") for line in log.splitlines()]


def phases(states: Mapping[str, JobState | None]) -> dict[str, str]:
    return {node: state.phase if state else Phase.ABSENT for node, state in states.items()}
