"""A work folder on a disk that is full: before a start, and while a job runs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.trainer.conftest import Node, nodes_below
from trainer.protocol import Phase, StartResult

SLEEP = "import time; time.sleep(600)"
STEPS = "import time, os\nwhile not os.path.exists({stop!r}): time.sleep(0.05)"


@pytest.fixture
def small(tmp_path: Path, agent: Path) -> Iterator[Node]:
    """A node whose work folder has 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small disk can be mounted by root only")
    try:
        with nodes_below(disk, agent) as make:
            yield make("work")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def fill(node: Node) -> Path:
    """Takes every byte that is left."""
    path = Path(node.workdir) / "filler"
    with path.open("wb", buffering=0) as stream:
        for size in (65536, 4096, 1):
            try:
                while stream.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return path


def test_a_start_says_so_and_leaves_nothing(small):
    small.paths.create()
    filler = fill(small)
    reply = small.start(SLEEP)
    assert reply.result == StartResult.FAILED
    assert "No space left on device" in reply.error
    assert small.alive() == set()
    assert small.state().phase == Phase.ABSENT
    filler.unlink()
    assert small.start(SLEEP).result == StartResult.STARTED, "the lease is free"


def test_a_job_that_runs_goes_on_and_ends_with_its_exit_code(small, tmp_path):
    stop = tmp_path / "stop"
    small.start(STEPS.format(stop=str(stop)))
    filler = fill(small)
    small.until(lambda: is_stale(small), 20)
    assert small.state().phase == Phase.RUNNING, "proven by the process, not by what it could write"
    stop.touch()
    filler.unlink()
    state = small.wait()
    assert (state.phase, state.exit_code, state.stop_reason) == (Phase.EXITED, 0, None)


def test_a_job_that_ends_on_a_full_disk_has_its_last_word_when_there_is_room(small, tmp_path):
    stop = tmp_path / "stop"
    small.start(STEPS.format(stop=str(stop)))
    child = small.state().child
    filler = fill(small)
    small.until(lambda: is_stale(small), 20)
    stop.touch()
    small.until(lambda: not Path(f"/proc/{child.pid}").exists())
    assert small.state().phase == Phase.RUNNING, "nothing else could be written"
    filler.unlink()
    assert small.wait().exit_code == 0


def is_stale(node: Node) -> bool:
    """Whether the heartbeat stands still for longer than a supervisor takes for one."""
    before = node.state().heartbeat
    time.sleep(2.5)
    return node.state().heartbeat == before
