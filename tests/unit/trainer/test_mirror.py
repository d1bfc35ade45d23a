"""Uploads while a job runs: a real job, a real server, and an uploader that is killed, starved, denied and outlived."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
from pathlib import Path

import pytest

from local.oss_server.auth import Credential
from local.oss_server.serving import running_server
from tests.unit.trainer.layouts import DDP, FULL, common
from trainer import protocol, store, transfer
from trainer.protocol import BackupRequest, MirrorReply, MirrorRequest, MirrorState, OssCredentials, OssTarget, Phase

REGION, BUCKET = "cn-hangzhou", "checkpoints"
KEYS = OssCredentials("STS.key", "very-secret-key", "very-secret-token-1")
NEW_KEYS = OssCredentials("STS.key", "very-secret-key", "very-secret-token-2")
SLEEP = "import time; time.sleep(600)"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = {"STS.key": Credential("very-secret-key", "very-secret-token-1")}
    root = tmp_path_factory.mktemp("oss")
    with running_server(root, keys, buckets=[BUCKET], region=REGION) as running:
        yield running, keys


@pytest.fixture
def target(server, request):
    running, keys = server
    running.faults.clear()
    keys["STS.key"] = Credential("very-secret-key", "very-secret-token-1")
    prefix = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    yield OssTarget(running.endpoint, REGION, BUCKET, prefix, KEYS)
    running.faults.clear()


@pytest.fixture
def output(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def write_checkpoint(output: Path, step: int, big: int = 0) -> None:
    for name, content in {**common(step), **FULL, **DDP}.items():
        path = output / f"checkpoint-{step}" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    if big:
        (output / f"checkpoint-{step}" / "optimizer.pt").write_bytes(os.urandom(big))


def start_mirror(node, output, target, **more) -> MirrorReply:
    request = MirrorRequest(node.workdir, "job", str(output), target, "node1", **more)
    done = node.verb("mirror", request)
    assert done.returncode == 0, done.stderr
    return protocol.loads(MirrorReply, done.stdout)


def holders(node) -> list[int]:
    """The uploaders of this node: who has the lock file of its job open."""
    path, found = node.paths.job("job").mirror_lock, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(entry.readlink()) == path for entry in (folder / "fd").iterdir()):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def state_of(node) -> MirrorState:
    return node.state().mirror or MirrorState()


def send_rest(node, output, target, name: str) -> protocol.BackupReply:
    folder = output / name
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    place = dataclasses.replace(target, prefix=target.key(name))
    return transfer.backup(
        BackupRequest(str(output), name, paths, place, "node1", state_dir=str(Path(node.workdir) / "uploads"))
    )


def test_each_checkpoint_is_sent_as_soon_as_it_is_complete(node, output, target):
    node.start(SLEEP, output_dir=str(output))
    assert start_mirror(node, output, target) == MirrorReply(started=True)
    write_checkpoint(output, 8, big=1 << 20)
    node.until(lambda: state_of(node).safe == ["checkpoint-8"])
    write_checkpoint(output, 16)
    node.until(lambda: state_of(node).safe == ["checkpoint-8", "checkpoint-16"])
    (pid,) = holders(node)
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    texts = [Path(f"/proc/{pid}/environ").read_text(), Path(f"/proc/{pid}/cmdline").read_text()]
    texts += [path.read_bytes().decode("latin-1") for path in Path(node.workdir).rglob("*") if path.is_file()]
    assert not [text for text in texts if "very-secret" in text]
    assert store.find_manifests(target) == {}  # that is for who has seen all nodes
    node.stop()
    node.until(lambda: not holders(node))
    assert state_of(node).safe == ["checkpoint-8", "checkpoint-16"]
    for name in ("checkpoint-8", "checkpoint-16"):
        reply = send_rest(node, output, target, name)
        assert (reply.errors, reply.sent) == ({}, 0)


def test_what_is_being_written_waits(node, output, target):
    node.start(SLEEP, output_dir=str(output))
    start_mirror(node, output, target)
    write_checkpoint(output, 8)
    (output / "checkpoint-8" / "model.safetensors").write_bytes(b"half")
    write_checkpoint(output, 16)
    node.until(lambda: state_of(node).safe == ["checkpoint-16"])
    write_checkpoint(output, 8)
    node.until(lambda: state_of(node).safe == ["checkpoint-8", "checkpoint-16"], 30)


def test_a_training_that_ends_is_not_waited_for_and_the_rest_is_sent_later(server, node, output, target):
    running, _ = server
    node.start(SLEEP, output_dir=str(output))
    running.inject(kind="slow", bytes_per_second=2 << 20, operation="upload_part", times=None)
    start_mirror(node, output, target, part_size=1 << 20)
    write_checkpoint(output, 8, big=32 << 20)
    node.until(lambda: state_of(node).done > 8 << 20)
    moving = state_of(node)
    assert (moving.checkpoint, moving.total > 32 << 20, moving.rate > 0) == ("checkpoint-8", True, True)
    assert moving.remaining_s is not None
    node.stop()
    node.until(lambda: not holders(node), 10)
    running.faults.clear()
    reply = send_rest(node, output, target, "checkpoint-8")
    assert reply.errors == {}
    assert 0 < reply.sent < 28 << 20
    assert reply.leftovers == 0


def test_expired_keys_are_told_and_new_ones_are_taken_up(server, node, output, target):
    _, keys = server
    keys["STS.key"] = Credential("very-secret-key", "very-secret-token-2")
    node.start(SLEEP, output_dir=str(output))
    start_mirror(node, output, target)
    write_checkpoint(output, 8)
    node.until(lambda: state_of(node).error)
    assert node.state().phase == Phase.RUNNING
    assert "very-secret" not in str(state_of(node))
    reply = start_mirror(node, output, dataclasses.replace(target, credentials=NEW_KEYS))
    assert reply == MirrorReply(refreshed=True)
    node.until(lambda: state_of(node).safe == ["checkpoint-8"])
    assert state_of(node).error is None


def test_a_killed_mirror_ends_no_training_and_the_next_goes_on(server, node, output, target):
    running, _ = server
    node.start(SLEEP, output_dir=str(output))
    running.inject(kind="slow", bytes_per_second=2 << 20, operation="upload_part", times=None)
    write_checkpoint(output, 8, big=24 << 20)
    start_mirror(node, output, target, part_size=1 << 20)
    node.until(lambda: state_of(node).done > 6 << 20)
    (pid,) = holders(node)
    os.kill(pid, signal.SIGKILL)
    node.until(lambda: not holders(node))
    assert node.state().phase == Phase.RUNNING
    running.faults.clear()
    assert start_mirror(node, output, target, part_size=1 << 20).started
    node.until(lambda: state_of(node).safe == ["checkpoint-8"])
    assert state_of(node).sent < 20 << 20


def test_there_is_no_mirror_without_a_job(node, output, target):
    assert "no job job runs" in (start_mirror(node, output, target).error or "")
    node.start("pass", output_dir=str(output))
    node.wait()
    assert "no job job runs" in (start_mirror(node, output, target).error or "")


def test_two_starts_at_once_make_one_mirror(node, output, target):
    node.start(SLEEP, output_dir=str(output))
    request = MirrorRequest(node.workdir, "job", str(output), target, "node1")
    children: list[subprocess.Popen[str]] = [node.popen("mirror", request) for _ in range(3)]
    assert [child.wait(30) for child in children] == [0, 0, 0]
    node.until(lambda: len(holders(node)) == 1)
    for child in children:
        child.stdout.close()
        child.stderr.close()


def test_nodes_that_see_the_same_files_share_them(make_node, output, target):
    nodes = [make_node("node1"), make_node("node2")]
    for index, one in enumerate(nodes):
        one.start(SLEEP, output_dir=str(output))
        start_mirror(one, output, target, share=index, shares=2)
    write_checkpoint(output, 8, big=1 << 20)
    for one in nodes:
        one.until(lambda one=one: state_of(one).safe == ["checkpoint-8"])
    sent = [state_of(one).sent for one in nodes]
    assert all(sent)
    assert sum(sent) == sum(path.stat().st_size for path in (output / "checkpoint-8").iterdir())
