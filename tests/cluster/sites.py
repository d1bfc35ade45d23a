"""Two nodes and everything to train on them: one way to speak for loopback nodes and for namespace hosts."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from local import envs
from local.netns import HostCluster
from local.nodes import LocalNode
from local.processes import descendants_marked
from swift_provider.config import Cluster, Recipe
from swift_provider.hooks.group import NodeGroup
from swift_provider.hooks.nodes import NodesHook
from swift_provider.operators.gang import Gang
from swift_provider.planning.gang import GangHandle
from swift_provider.planning.names import job_id
from swift_provider.planning.plan import LaunchPlan
from swift_provider.planning.planner import make_plan
from tests.cluster import stand_in
from trainer import protocol
from trainer.process import is_alive, node_key
from trainer.protocol import MARKER, JobState, Owner, Phase
from trainer.supervise import NAME

T = TypeVar("T")


@dataclass
class Site:
    """Nodes for one test, each with work folders of its own.

    ``roots`` says for each node where its folder lies on this machine, ``workdirs`` how the node calls it.
    """

    nodes: list[Any]
    roots: dict[str, Path]
    workdirs: dict[str, str]
    packages: Path
    port: int
    cluster: HostCluster | None = None
    shared: Path | None = None
    tag: str = field(default_factory=lambda: secrets.token_hex(4))

    # -- connections and plans --------------------------------------------------------------------------------

    def conn_id(self, name: str) -> str:
        return f"ssh_{self.tag}_{name}"

    def publish(self, name: str, **changes: Any) -> None:
        """Sets the node's connection, with ``changes`` of its fields or of its extra."""
        connection = next(node for node in self.nodes if node.name == name).connection()
        extra = {**connection["extra"], **changes.pop("extra", {})}
        connection = {
            **connection,
            **changes,
            "extra": {key: value for key, value in extra.items() if value is not None},
        }
        os.environ[f"AIRFLOW_CONN_{self.conn_id(name).upper()}"] = json.dumps(connection)

    def withdraw(self) -> None:
        for node in self.nodes:
            os.environ.pop(f"AIRFLOW_CONN_{self.conn_id(node.name).upper()}", None)

    def cluster_nodes(self, slots: int) -> list[dict[str, Any]]:
        """The nodes as a cluster file has them."""
        return [
            {
                "name": node.name,
                "ssh_conn_id": self.conn_id(node.name),
                "address": node.address,
                "slots": slots,
                "workdir": self.workdirs[node.name],
            }
            for node in self.nodes
        ]

    def plan(
        self,
        run_id: str = "run",
        *,
        checkpoints: dict[str, Any] | None = None,
        export: dict[str, Any] | None = None,
        **more: Any,
    ) -> LaunchPlan:
        """A launch plan as the ``plan`` task makes it. Keys of the recipe and the cluster are told apart by name;
        everything else is an ms-swift argument."""
        cluster = {"grace": 2.0, "min_free_gib": 0.0, "python": str(trainer_python()), "slots": 1, "max_runtime": None}
        cluster |= {key: more.pop(key) for key in list(more) if key in cluster}
        args = {"model": "stand/in", "dataset": ["stand/in"], "max_steps": 5, "save_steps": 2}
        args |= {"per_device_train_batch_size": 1, **stand_in.arguments(), **more}
        recipe = {"grace": cluster.pop("grace"), "max_runtime": cluster.pop("max_runtime"), "export": export}
        slots = cluster.pop("slots")
        return make_plan(
            Recipe.model_validate(
                {**recipe, "name": "r", "cluster": "c", "swift": {"args": args}, "checkpoints": checkpoints or {}}
            ),
            Cluster.model_validate(
                {
                    **cluster,
                    "name": "c",
                    "device": "cpu",
                    "nodes": self.cluster_nodes(slots),
                    "master_port": self.port,
                    "shared_dir": str(self.shared) if self.shared else None,
                    "env": {"PYTHONPATH": str(self.packages)},
                }
            ),
            dag_id="dag",
            run_id=run_id,
        )

    # -- running ----------------------------------------------------------------------------------------------

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """``function`` where the nodes can be reached from."""
        return self.cluster.call(function, *args) if self.cluster else function(*args)

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """The coroutine that ``work`` makes, in a loop of its own where the nodes can be reached from."""

        async def body() -> T:
            return await work()

        return self.call(lambda: asyncio.run(body()))

    def with_group(self, plan: LaunchPlan, work: Callable[[NodeGroup], Awaitable[T]]) -> T:
        """``work`` with the plan's nodes, connected on demand and closed at the end."""

        async def body() -> T:
            async with NodesHook.for_plan(plan).group() as group:
                return await work(group)

        return self.run(body)

    def start(self, plan: LaunchPlan, generation: int = 1, owner: Owner | None = None) -> str:
        """Starts the plan's gang and returns the job id."""
        handle = self.handle(plan, generation)
        self.with_group(plan, lambda group: self.gang(plan, group, owner).start(handle, None))
        return handle.job_id

    @staticmethod
    def handle(plan: LaunchPlan, generation: int = 1) -> GangHandle:
        return GangHandle(generation, job_id(plan.dag_id, plan.run_id, "train", -1, generation), "hash")

    @staticmethod
    def gang(plan: LaunchPlan, group: NodeGroup, owner: Owner | None = None) -> Gang:
        return Gang(
            plan, group, owner or Owner(dag_id=plan.dag_id, run_id=plan.run_id, task_id="train", origin="here"), {}
        )

    # -- looking, past everything that is tested ----------------------------------------------------------------

    def folder(self, name: str) -> Path:
        """The node's work folder as this machine sees it."""
        return self.roots[name]

    def log(self, name: str, job: str) -> bytes:
        return (self.folder(name) / "jobs" / job / "log").read_bytes()

    def state(self, name: str, job: str) -> JobState:
        return protocol.loads(JobState, (self.folder(name) / "jobs" / job / "state.json").read_text())

    def processes(self, name: str) -> set[int]:
        """Every process of a job of this test on the node, ranks and their children, from /proc alone."""
        found = set(descendants_marked(MARKER, f"{node_key(self.workdirs[name])}/"))
        return found & set(self.cluster[name].processes()) if self.cluster else found

    def clean_up(self) -> None:
        """Kills what a test left running, supervisors first; afterwards nothing may be there."""
        for node in self.nodes:
            for path in self.folder(node.name).glob("jobs/*/state.json"):
                state = self.state(node.name, path.parent.name)
                if state.phase in Phase.ALIVE and self.cluster is None and is_alive(state.supervisor):
                    kill(state.supervisor.pid, signal.SIGKILL)
            if self.cluster is not None:
                self._end_supervisors(node.name)
            limit = time.monotonic() + 10
            while self.processes(node.name) and time.monotonic() < limit:
                for pid in self.processes(node.name):
                    kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            assert not self.processes(node.name)

    def _end_supervisors(self, name: str) -> None:
        for pid in self.supervisors(name):
            kill(pid, signal.SIGKILL)

    def supervisors(self, name: str) -> list[int]:
        """Pids, as this machine numbers them, of the supervisors of this test's jobs on the node."""
        everybody = (
            self.cluster[name].processes() if self.cluster else [int(p.name) for p in Path("/proc").glob("[0-9]*")]
        )
        return [pid for pid in everybody if is_supervisor(pid, os.path.realpath(self.workdirs[name]))]


def is_supervisor(pid: int, workdir: str) -> bool:
    """Whether a process is the supervisor of a job in this work folder, by its name and the log that it writes."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text().strip() == NAME:
            return str(Path(f"/proc/{pid}/fd/2").readlink()).startswith(f"{workdir}/jobs/")
    return False


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@functools.cache
def trainer_python() -> Path:
    """The interpreter of the training environment; asked once, before a test moves HOME and with it the cache."""
    return envs.python_of(envs.ensure("trainer"))


def until(condition: Callable[[], Any], timeout: float = 20.0) -> Any:
    """The first true value of ``condition``."""
    limit = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < limit, f"waited {timeout:g} s in vain"
        time.sleep(0.05)


@contextlib.contextmanager
def loopback_site(nodes: list[LocalNode], folder: Path, port: int, shared: bool = False) -> Iterator[Site]:
    """A site on running loopback nodes."""
    roots = {node.name: folder / node.name / "work" for node in nodes}
    site = Site(
        nodes=nodes,
        roots=roots,
        workdirs={name: str(path) for name, path in roots.items()},
        packages=stand_in.install(folder / "packages"),
        port=port,
        shared=folder / "shared" if shared else None,
    )
    yield from _use(site)


@contextlib.contextmanager
def host_site(cluster: HostCluster, folder: Path, port: int) -> Iterator[Site]:
    """A site on running namespace hosts; each host keeps its part on its own ``/srv``."""
    name = f"work-{base64.b32encode(secrets.token_bytes(5)).decode().lower()}"
    site = Site(
        nodes=list(cluster.hosts),
        roots={host.name: host.disk / name for host in cluster.hosts},
        workdirs={host.name: f"/srv/{name}" for host in cluster.hosts},
        packages=stand_in.install(folder / "packages"),
        port=port,
        cluster=cluster,
    )
    yield from _use(site)


def _use(site: Site) -> Iterator[Site]:
    for node in site.nodes:
        site.publish(node.name)
    try:
        yield site
    finally:
        site.clean_up()
        site.withdraw()
