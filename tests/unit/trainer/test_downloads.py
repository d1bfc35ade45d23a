"""The download engine where things go wrong: broken answers, killed receivers, replaced objects, full disks."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import time

import pytest

from trainer import protocol, store, transfer
from trainer.protocol import FetchReply, FetchRequest, Manifest, OssTarget, StoredFile
from trainer.store import crc64, download
from trainer.store.client import StoreError

PART = 256 * 1024


@pytest.fixture
def target(place, monkeypatch):
    monkeypatch.setattr(download, "PART", PART)
    return place


def put(target: OssTarget, name: str, size: int, seed: int = 1) -> tuple[bytes, StoredFile]:
    data = random.Random(seed).randbytes(size)  # noqa: S311
    store.open_bucket(target).put_object(target.key(name), data)
    return data, StoredFile(name, size, str(crc64.update(0, data)))


def get(target: OssTarget, path, file: StoredFile) -> int:
    wanted = store.Wanted(target.key(file.path), str(path), file.size, file.crc64)
    return store.get_files(store.open_bucket(target), [wanted])


@pytest.mark.parametrize("size", [0, 1, PART, 7 * PART + 13])
def test_a_file_arrives_whole_and_leaves_nothing_beside_it(target, tmp_path, size):
    data, file = put(target, "shard.pt", size)
    assert get(target, tmp_path / "shard.pt", file) == size
    assert (tmp_path / "shard.pt").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["shard.pt"]
    assert get(target, tmp_path / "shard.pt", file) == 0


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "status": 503},
        {"kind": "throttle", "delay_ms": 20},
        {"kind": "reset", "after_bytes": 100_000},
        {"kind": "reset", "after_bytes": 0},
        {"kind": "lost_reply"},
    ],
    ids=lambda fault: f"{fault['kind']}{fault.get('after_bytes', '')}",
)
@pytest.mark.parametrize("times", [1, 5])
def test_a_fault_that_passes_does_not_show(server, target, tmp_path, fault, times):
    data, file = put(target, "shard.pt", 7 * PART + 13)
    server.inject(**fault, operation="get_object", times=times, skip=1)
    get(target, tmp_path / "shard.pt", file)
    assert (tmp_path / "shard.pt").read_bytes() == data


def test_what_came_is_not_fetched_again_unless_it_was_damaged(server, target, tmp_path):
    data, file = put(target, "shard.pt", 8 * PART)
    server.inject(kind="status", status=403, code="AccessDenied", operation="get_object", skip=5, times=None)
    with pytest.raises(StoreError, match="RAM policy"):
        get(target, tmp_path / "shard.pt", file)
    assert not (tmp_path / "shard.pt").exists()
    server.faults.clear()
    with (tmp_path / "shard.pt.download").open("r+b") as stream:
        stream.write(b"damaged")  # in the first part
    assert get(target, tmp_path / "shard.pt", file) == 4 * PART
    assert (tmp_path / "shard.pt").read_bytes() == data


def test_an_object_that_is_replaced_meanwhile_is_never_mixed(server, target, tmp_path):
    _, old = put(target, "shard.pt", 8 * PART)
    server.inject(kind="status", status=403, code="AccessDenied", operation="get_object", skip=5, times=None)
    with pytest.raises(StoreError):
        get(target, tmp_path / "shard.pt", old)
    server.faults.clear()
    data, new = put(target, "shard.pt", 8 * PART, seed=2)
    with pytest.raises(StoreError, match="CRC64"):
        get(target, tmp_path / "shard.pt", old)
    assert not (tmp_path / "shard.pt").exists()
    assert get(target, tmp_path / "shard.pt", new) == 8 * PART
    assert (tmp_path / "shard.pt").read_bytes() == data


def test_a_disk_that_is_too_small_is_told_at_once(server, target, tmp_path, monkeypatch):
    _, file = put(target, "shard.pt", 8 * PART)

    def full(_descriptor: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    server.inject(kind="status", status=500, operation="get_object", times=None)  # nothing is to be asked for
    with pytest.raises(StoreError, match="do not fit"):
        get(target, tmp_path / "shard.pt", file)
    assert server.faults.state()[0]["hits"] == 0


@pytest.mark.parametrize("left", ["shard.pt.download", "shard.pt.download.jsonl", "shard.pt.download.jsonl.7-9.tmp"])
def test_what_a_kill_at_the_last_moment_leaves_is_swept_up(target, tmp_path, left):
    _, file = put(target, "shard.pt", 3 * PART)
    get(target, tmp_path / "shard.pt", file)
    (tmp_path / left).write_text("left")
    (tmp_path / "model.download").write_text("somebody else's")
    assert get(target, tmp_path / "shard.pt", file) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.download", "shard.pt"]


def test_killed_at_any_moment_and_in_place_only_when_whole(server, target, tmp_path, node, monkeypatch):
    monkeypatch.undo()
    files = [put(target, f"shard-{number}.pt", 9 << 20, number)[1] for number in range(3)]
    store.write_manifest(target, Manifest("checkpoint-8", 8, "full", "complete", files))
    server.inject(kind="slow", bytes_per_second=4 << 20, operation="get_object", times=None)
    noise = random.Random(3)  # noqa: S311
    kills = 0
    for turn in range(4):
        destination = tmp_path / str(turn) / "checkpoint-8"
        for patience in [*(noise.uniform(0.3, 1.2) for _ in range(4)), 60.0]:
            child = node.popen("fetch", FetchRequest(target, str(destination)))
            child.stdin = None
            try:
                text, _ = child.communicate(timeout=patience)
            except subprocess.TimeoutExpired:
                child.kill()
                child.communicate()
                kills += 1
                continue
            reply = protocol.loads(FetchReply, text)
            assert (reply.error, reply.size) == (None, 27 << 20)
            break
        assert sorted(path.name for path in destination.iterdir()) == [file.path for file in files]
        for file in files:
            assert store.crc64_of(str(destination / file.path)) == file.crc64
    assert kills >= 4


def test_the_cap_holds(target, tmp_path):
    files = [put(target, f"shard-{number}.pt", 8 * PART, number)[1] for number in range(2)]
    store.write_manifest(target, Manifest("checkpoint-8", 8, "full", "complete", files))
    began = time.monotonic()
    reply = transfer.fetch(FetchRequest(target, str(tmp_path / "x"), bandwidth=4 << 20))
    assert (reply.error, reply.files, reply.received) == (None, 2, 16 * PART)
    assert time.monotonic() - began > 0.7
