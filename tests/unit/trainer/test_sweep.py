"""Old jobs and downloads go; what lives, what is young and what a job was told of stays."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from trainer import records
from trainer.files import locked, open_lock, try_lock
from trainer.paths import NodePaths
from trainer.process import identify
from trainer.protocol import JobSpec, JobState, Phase, SweepRequest
from trainer.sweep import sweep

DAY = 86400.0


@pytest.fixture
def node(tmp_path: Path) -> NodePaths:
    made = NodePaths(str(tmp_path / "work"))
    made.create()
    return made


def job(node: NodePaths, name: str, phase: str, days: float, **spec) -> Path:
    """The folder of a job whose end is ``days`` ago."""
    paths = node.job(name)
    paths.create()
    alive = identify(os.getpid()) if phase in Phase.ALIVE else None
    ended = None if phase in Phase.ALIVE else time.time() - days * DAY
    records.write_state(paths, JobState(name, phase, supervisor=alive, ended_at=ended))
    records.write_spec(paths, JobSpec(name, spec.pop("argv", ["swift"]), **spec))
    Path(paths.log).write_bytes(b"x" * 100)
    return Path(paths.folder)


def download(node: NodePaths, number: int, days: float, size: int = 1000) -> Path:
    folder = Path(node.cache) / f"{number:024x}"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights").write_bytes(b"w" * size)
    (folder / "lock").touch()
    os.utime(folder, (time.time() - days * DAY,) * 2)
    return folder


def names(reply) -> list[str]:
    return [Path(item.path).name for item in reply.found]


def test_old_jobs_go_and_living_ones_stay(node: NodePaths) -> None:
    old, young = job(node, "old", Phase.EXITED, 40), job(node, "young", Phase.EXITED, 2)
    living, lost = job(node, "living", Phase.RUNNING, 0), job(node, "lost", Phase.LOST, 50)
    request = SweepRequest(node.workdir, jobs_age_s=30 * DAY)
    assert names(sweep(request)) == ["lost", "old"]
    assert all(folder.exists() for folder in (old, young, living, lost))
    reply = sweep(SweepRequest(node.workdir, jobs_age_s=30 * DAY, delete=True))
    assert [(item.kind, item.error) for item in reply.found] == [("job", None)] * 2
    assert reply.found[0].size > 100
    assert {path.name for path in Path(node.jobs).iterdir()} == {"young", "living"}


def test_a_lost_job_that_was_never_buried_may_still_have_processes(node: NodePaths) -> None:
    folder = job(node, "unburied", Phase.EXITED, 40)
    records.write_state(node.job("unburied"), JobState("unburied", Phase.RUNNING))
    os.utime(folder, (time.time() - 40 * DAY,) * 2)
    assert names(sweep(SweepRequest(node.workdir, jobs_age_s=30 * DAY, delete=True))) == []
    assert folder.exists()


def test_downloads_go_by_age_unless_somebody_needs_them(node: NodePaths) -> None:
    old, used, held = (download(node, number, 40) for number in (1, 2, 3))
    young = download(node, 4, 1)
    job(node, "living", Phase.RUNNING, 0, files={"swift.yaml": f"model: {used}/model\n"})
    (Path(node.cache) / "digests.json").write_text("{}")
    with locked(str(held / "lock")):
        reply = sweep(SweepRequest(node.workdir, cache_age_s=30 * DAY, delete=True))
    assert names(reply) == [old.name]
    assert not old.exists()
    assert all(folder.exists() for folder in (used, held, young))
    assert (Path(node.cache) / "digests.json").exists()


def test_the_least_recently_wanted_go_until_the_rest_fits(node: NodePaths) -> None:
    first, second, third = (download(node, number, days) for number, days in ((1, 9), (2, 5), (3, 3)))
    fresh = download(node, 4, 0.1, size=100_000)
    limit = SweepRequest(node.workdir, cache_bytes=102_500, delete=True)
    assert names(sweep(limit)) == [first.name]
    assert names(sweep(limit)) == []
    assert names(sweep(SweepRequest(node.workdir, cache_bytes=10, delete=True))) == [second.name, third.name]
    assert fresh.exists(), "a training may be about to begin with it"


def test_a_node_that_never_started_a_job_has_no_locks_yet(node: NodePaths) -> None:
    old = job(node, "old", Phase.EXITED, 40)
    Path(node.locks).rmdir()
    [item] = sweep(SweepRequest(node.workdir, jobs_age_s=DAY, delete=True)).found
    assert (item.error, old.exists()) == (None, False)


def test_what_cannot_be_deleted_is_told(node: NodePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    old = job(node, "old", Phase.EXITED, 40)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)  # root may delete anything
    [item] = sweep(SweepRequest(node.workdir, jobs_age_s=DAY, delete=True)).found
    assert "Permission denied" in str(item.error)
    assert old.exists()


def test_what_a_sweep_left_half_deleted_is_finished(node: NodePaths) -> None:
    for parent in (node.jobs, node.cache):
        (Path(parent) / ".trash-old-1").mkdir()
    sweep(SweepRequest(node.workdir, jobs_age_s=DAY, cache_age_s=DAY))
    assert (Path(node.jobs) / ".trash-old-1").exists(), "without delete nothing goes"
    sweep(SweepRequest(node.workdir, jobs_age_s=DAY, cache_age_s=DAY, delete=True))
    assert not list(Path(node.jobs).iterdir())


def test_nothing_there_and_nothing_asked(node: NodePaths, tmp_path: Path) -> None:
    assert sweep(SweepRequest(str(tmp_path / "nowhere"), jobs_age_s=0, cache_age_s=0)).found == []
    job(node, "old", Phase.EXITED, 400)
    download(node, 1, 400)
    assert sweep(SweepRequest(node.workdir, delete=True)).found == []


def test_a_start_that_is_under_way_is_waited_for(node: NodePaths) -> None:
    folder = job(node, "old", Phase.EXITED, 40)
    start = open_lock(node.start_lock)
    assert try_lock(start)
    timer = threading.Timer(0.3, os.close, [start])
    timer.start()
    began = time.monotonic()
    sweep(SweepRequest(node.workdir, jobs_age_s=DAY, delete=True))
    assert time.monotonic() - began >= 0.25
    assert not folder.exists()
