"""A node in a temporary folder: real processes, real locks, and nothing left when the test is over."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.unit.trainer.oss import place, server  # noqa: F401 - fixtures
from trainer import jobs, process, protocol
from trainer.bundle import agent_bundle
from trainer.paths import NodePaths
from trainer.protocol import JobSpec, JobState, Phase, StartReply, StartRequest, StatusRequest, StopReply, StopRequest
from trainer.start import start
from trainer.stop import stop

# A busy machine is no fault of the code: examples may take as long as they need.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


class Node:
    """One node's work folder and short ways to say what a caller says."""

    def __init__(self, workdir: Path, agent: Path) -> None:
        self.workdir = str(workdir)
        self.paths = NodePaths(self.workdir)
        self.agent = agent

    def spec(self, code: str, job_id: str = "job", **more: Any) -> JobSpec:
        """A job that runs ``code`` in a bare Python."""
        return JobSpec(job_id=job_id, argv=[sys.executable, "-u", "-S", "-E", "-c", code], **more)

    def start(self, code: str, job_id: str = "job", hold_s: float = 0.0, **more: Any) -> StartReply:
        return start(StartRequest(self.workdir, self.spec(code, job_id, **more), hold_s))

    def stop(self, job_id: str = "job", wait_s: float = 20.0, **more: Any) -> StopReply:
        return stop(StopRequest(self.workdir, job_id, wait_s=wait_s, **more))

    def status(self, job_id: str = "job", **more: Any) -> protocol.StatusReply:
        return jobs.status(StatusRequest(self.workdir, job_id, **more))

    def state(self, job_id: str = "job") -> JobState:
        return self.status(job_id).state

    def wait(self, job_id: str = "job", timeout_s: float = 20.0) -> JobState:
        """The state of the job once it has ended."""
        self.until(lambda: self.state(job_id).phase in Phase.ENDED, timeout_s)
        return self.state(job_id)

    def log(self, job_id: str = "job") -> bytes:
        return Path(self.paths.job(job_id).log).read_bytes()

    def alive(self) -> set[int]:
        """The pids of this node's marked processes."""
        return {identity.pid for identity in process.marked(self.workdir)}

    @staticmethod
    def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
        """Wait for the condition; fail the test when it does not come true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.02)

    def verb(self, verb: str, request: Any, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
        """Run a verb as the control side does: the zipapp, JSON in, JSON out."""
        return self.popen(verb, request, python, wait=True)

    def popen(self, verb: str, request: Any, python: str = sys.executable, wait: bool = False) -> Any:
        text = request if isinstance(request, str) else json.dumps(protocol.to_dict(request))
        command = [python, "-I", str(self.agent), verb]
        if wait:
            return subprocess.run(command, input=text, capture_output=True, text=True, cwd="/", timeout=60)
        child = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True, cwd="/")
        assert child.stdin is not None
        child.stdin.write(text)
        child.stdin.close()
        return child

    def clean_up(self) -> None:
        """Stop what the test left running; afterwards nothing may be there."""
        for state in jobs.jobs(protocol.JobsRequest(self.workdir)).jobs:
            if state.phase not in Phase.ENDED or state.phase == Phase.LOST:
                self.stop(state.job_id, grace_s=0.0)
        process.kill_until_empty(lambda: process.marked(self.workdir))


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zipapp, as it lies on a node."""
    digest, data = agent_bundle()
    path = tmp_path_factory.mktemp("agent") / f"{digest}.pyz"
    path.write_bytes(data)
    return path


@contextlib.contextmanager
def nodes_below(folder: Path, agent: Path) -> Iterator[Callable[[str], Node]]:
    """Makes nodes by name, and cleans up after them."""
    nodes: list[Node] = []

    def make(name: str) -> Node:
        nodes.append(Node(folder / name, agent))
        return nodes[-1]

    try:
        yield make
    finally:
        for node in nodes:
            node.clean_up()


@pytest.fixture
def make_node(tmp_path: Path, agent: Path) -> Iterator[Callable[[str], Node]]:
    """Any number of nodes on this machine."""
    with nodes_below(tmp_path, agent) as make:
        yield make


@pytest.fixture(scope="module")
def make_shared_node(tmp_path_factory: pytest.TempPathFactory, agent: Path) -> Iterator[Callable[[str], Node]]:
    """Nodes that the tests of a module share."""
    with nodes_below(tmp_path_factory.mktemp("nodes"), agent) as make:
        yield make


@pytest.fixture
def node(make_node: Callable[[str], Node]) -> Node:
    """One node."""
    return make_node("node")
