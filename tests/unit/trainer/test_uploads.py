"""The upload engine where things go wrong: each fault at each step, killed senders, two at once, changed files."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import protocol, store, transfer
from trainer.protocol import BackupReply, BackupRequest, Manifest, OssCredentials, OssTarget
from trainer.store import crc64, multipart, upload
from trainer.store.client import list_uploads
from trainer.store.journal import Journal
from trainer.store.pace import Pace

PART = 256 * 1024


@pytest.fixture
def target(place, monkeypatch):
    monkeypatch.setattr(upload, "MULTIPART_FROM", 2 * PART)
    return place


def fill(folder: Path, sizes: dict[str, int], seed: int = 1) -> None:
    noise = random.Random(seed)  # noqa: S311
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise.randbytes(size))


SIZES = {"shard-0.pt": 9 * PART + 17, "shard-1.pt": 6 * PART, "config.json": 900, "empty": 0}


@pytest.fixture
def output(tmp_path):
    fill(tmp_path / "out" / "checkpoint-8", SIZES)
    return tmp_path / "out"


def backup(output, target, **more) -> BackupReply:
    request = BackupRequest(str(output), target.prefix.rpartition("/")[2], list(SIZES), target, "n1", part_size=PART)
    return transfer.backup(dataclasses.replace(request, **more))


def prove(output: Path, target: OssTarget, reply: BackupReply, sizes: dict[str, int] | None = None) -> None:
    """What the reply says is in the bucket is there, byte for byte, and nothing unfinished is left."""
    sizes = SIZES if sizes is None else sizes
    assert reply.errors == {}
    assert {file.path: file.size for file in reply.files} == sizes
    bucket = store.open_bucket(target)
    for file in reply.files:
        local = (output / target.prefix.rpartition("/")[2] / file.path).read_bytes()
        assert bucket.get_object(target.key(file.path)).read() == local
        assert int(file.crc64) == crc64.update(0, local)
    assert list(list_uploads(bucket, target.prefix)) == []


# -- each fault at each step ------------------------------------------------------------------------------------

STEPS = ("head_object", "initiate_multipart_upload", "upload_part", "complete_multipart_upload", "put_object")
FAULTS: list[dict[str, Any]] = [
    {"kind": "status", "status": 500},
    {"kind": "status", "status": 503},
    {"kind": "throttle", "delay_ms": 20},
    {"kind": "reset", "after_bytes": 0},
    {"kind": "lost_reply"},
]
MATRIX = [{**fault, "operation": step} for step in STEPS for fault in FAULTS]
MATRIX += [{"kind": "reset", "after_bytes": 100_000, "operation": "upload_part"}]
MATRIX += [{"kind": "wrong_crc", "operation": step} for step in ("upload_part", "put_object")]
MATRIX += [{"kind": "status", "status": 400, "code": "RequestTimeout", "operation": "upload_part"}]
MATRIX += [{"kind": "status", "status": 404, "code": "NoSuchUpload", "operation": "upload_part", "skip": 3}]
MATRIX += [{"kind": "status", "status": 400, "code": "InvalidPart", "operation": "complete_multipart_upload"}]


@pytest.mark.parametrize("fault", MATRIX, ids=lambda f: f"{f['operation']}-{f['kind']}-{f.get('status', '')}")
@pytest.mark.parametrize("times", [1, 3])
def test_a_fault_that_passes_costs_nothing(server, output, target, fault, times):
    server.inject(**{**fault, "times": times})
    prove(output, target, backup(output, target))


def test_faults_at_random_all_the_time(server, output, target):
    noise = random.Random(20261130)  # noqa: S311
    for _ in range(60):
        fault = dict(noise.choice(MATRIX), times=noise.choice([1, 1, 2]), skip=noise.randrange(12))
        server.inject(**fault)
    reply = backup(output, target)
    for _ in range(5):  # a file may meet more faults in a row than one call is patient with; none may be lost
        if not reply.errors:
            break
        reply = backup(output, target)
    prove(output, target, reply)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"kind": "skew"}, "this machine's clock is wrong"),
        ({"kind": "expired_token"}, "temporary credentials have run out"),
        ({"kind": "status", "status": 403, "code": "AccessDenied"}, "RAM policy"),
        ({"kind": "status", "status": 403, "code": "QuotaExceeded"}, "bucket is full"),
    ],
)
def test_what_waiting_does_not_cure_is_told_at_once_with_its_cure(server, output, target, fault, said):
    server.inject(**{**fault, "operation": "upload_part", "times": None})
    began = time.monotonic()
    reply = backup(output, target)
    assert time.monotonic() - began < 5
    assert set(reply.errors) == {"shard-0.pt", "shard-1.pt"}
    assert re.search(said, reply.errors["shard-0.pt"], re.IGNORECASE)
    assert [file.path for file in reply.files] == ["config.json", "empty"]
    server.faults.clear()
    prove(output, target, backup(output, target))


def test_a_server_that_asks_for_a_delay_gets_it(server, output, target):
    for _ in range(12):  # more often than other errors may come
        server.inject(kind="throttle", delay_ms=80, operation="put_object", times=1)
    began = time.monotonic()
    reply = backup(output, target, files=["config.json"])
    assert reply.errors == {}
    assert time.monotonic() - began >= 12 * 0.08


# -- killed, and again -----------------------------------------------------------------------------------------


def test_killed_at_any_moment_fifty_times(server, output, target, node, monkeypatch):
    """The sender is a process of its own; whatever it left, the next one finishes, and little is sent twice."""
    monkeypatch.undo()
    sizes, part = {"shard.pt": 20 << 20, "config.json": 900}, 1 << 20
    noise = random.Random(8)  # noqa: S311
    server.inject(kind="slow", bytes_per_second=4 << 20, operation="upload_part", times=None)
    kills = 0
    for content in range(5):
        # A new content in the old place: what was noted of the old one must not count.
        fill(output / "checkpoint-8", sizes, seed=content)
        request = BackupRequest(str(output), "checkpoint-8", list(sizes), target, "n1", part_size=part)
        for _ in range(10):
            child = node.popen("backup", request)
            child.stdin = None  # closed already; communicate() would want to flush it
            try:
                text, _ = child.communicate(timeout=noise.uniform(0.3, 1.0))
                prove(output, target, protocol.loads(BackupReply, text), sizes)
            except subprocess.TimeoutExpired:
                child.kill()
                child.communicate()
                kills += 1
        prove(output, target, transfer.backup(request), sizes)
    assert kills >= 25
    # Each kill costs at most the parts that are under way: four, one per thread.
    assert server.faults.state()[0]["hits"] <= 5 * 20 + 4 * kills


def test_only_what_is_missing_is_sent_and_it_is_proven_first(server, output, target):
    server.inject(kind="status", status=403, code="AccessDenied", operation="upload_part", skip=6, times=None)
    assert backup(output, target, files=["shard-0.pt"], threads=1).errors
    server.faults.clear()
    reply = backup(output, target, files=["shard-0.pt"])
    assert reply.sent == SIZES["shard-0.pt"] - 6 * PART
    prove(output, target, reply, {"shard-0.pt": SIZES["shard-0.pt"]})


def test_a_part_that_changed_behind_the_times_is_sent_again(server, output, target):
    path = output / "checkpoint-8" / "shard-0.pt"
    server.inject(kind="status", status=403, code="AccessDenied", operation="upload_part", skip=6, times=None)
    assert backup(output, target, files=["shard-0.pt"], threads=1).errors
    server.faults.clear()
    stat = path.stat()
    with path.open("r+b") as stream:
        stream.seek(PART + 5)
        stream.write(b"changed")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    reply = backup(output, target, files=["shard-0.pt"])
    assert reply.sent == SIZES["shard-0.pt"] - 5 * PART
    prove(output, target, reply, {"shard-0.pt": SIZES["shard-0.pt"]})


def test_another_file_of_that_name_begins_anew_and_leaves_nothing_behind(server, output, target):
    server.inject(kind="status", status=403, code="AccessDenied", operation="upload_part", skip=6, times=None)
    assert backup(output, target, files=["shard-0.pt"], threads=1).errors
    server.faults.clear()
    fill(output / "checkpoint-8", {"shard-0.pt": 5 * PART}, seed=9)
    reply = backup(output, target, files=["shard-0.pt"])
    assert reply.sent == 5 * PART
    prove(output, target, reply, {"shard-0.pt": 5 * PART})


def test_leftovers_that_nobody_has_noted_are_dropped(output, target):
    bucket = store.open_bucket(target)
    for name in ("shard-0.pt", "config.json"):
        bucket.init_multipart_upload(target.key(name))
    stranger = bucket.init_multipart_upload(target.key("not-sent-by-us")).upload_id
    reply = backup(output, target)
    assert reply.leftovers == 2
    assert [found[1] for found in list_uploads(bucket, target.prefix)] == [stranger]
    bucket.abort_multipart_upload(target.key("not-sent-by-us"), stranger)


def test_a_file_that_changes_while_it_is_sent_does_not_count(server, output, target):
    server.inject(kind="slow", bytes_per_second=1 << 20, operation="upload_part", times=None)
    path = output / "checkpoint-8" / "shard-0.pt"
    timer = threading.Timer(0.5, lambda: path.write_bytes(b"x" * SIZES["shard-0.pt"]))
    timer.start()
    reply = backup(output, target, files=["shard-0.pt"])
    timer.join()
    assert "changed while it was sent" in reply.errors["shard-0.pt"]
    server.faults.clear()
    prove(output, target, backup(output, target))


# -- two at once, and what is there already ---------------------------------------------------------------------


def test_two_senders_of_one_checkpoint_at_once(output, target, tmp_path):
    """Two nodes with a shared disk, or two that know nothing of each other: both prove the same bytes."""
    replies: list[BackupReply] = []

    def run(state: str) -> None:
        replies.append(backup(output, target, state_dir=str(tmp_path / state)))

    threads = [threading.Thread(target=run, args=(state,)) for state in ("one", "other", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(replies) == 3
    for reply in replies:
        prove(output, target, reply)


def test_what_a_manifest_speaks_for_is_never_overwritten(output, target):
    reply = backup(output, target)
    manifest = Manifest("checkpoint-8", 8, "full", "complete", reply.files)
    store.write_manifest(target, manifest)
    fill(output / "checkpoint-8", {"shard-1.pt": SIZES["shard-1.pt"], "config.json": 901}, seed=5)
    again = backup(output, target)
    assert set(again.errors) == {"shard-1.pt", "config.json"}
    assert "proven checkpoint of the same name" in again.errors["config.json"]
    assert store.verify(target, manifest) == {}


def test_the_next_checkpoint_sends_only_what_is_new(server, output, target):
    prove(output, target, backup(output, target))
    second = dataclasses.replace(target, prefix=target.prefix[:-1] + "16")
    fill(output / "checkpoint-16", SIZES)
    fill(output / "checkpoint-16", {"shard-1.pt": SIZES["shard-1.pt"]}, seed=2)
    reply = backup(output, second)
    assert (reply.sent, reply.copied) == (SIZES["shard-1.pt"] + 900, SIZES["shard-0.pt"])
    prove(output, second, reply)
    store.delete_checkpoint(target)
    prove(output, second, backup(output, second))  # a copy is an object of its own
    third = dataclasses.replace(target, prefix=target.prefix[:-1] + "24")
    fill(output / "checkpoint-24", SIZES)
    server.inject(kind="status", status=403, code="AccessDenied", operation="copy_object", times=None)
    reply = backup(output, third)
    assert reply.copied == 0
    prove(output, third, reply)


def test_big_objects_are_copied_in_parts(output, target, monkeypatch):
    monkeypatch.setattr(multipart, "COPY_PART", 2 * PART)
    backup(output, target)
    second = dataclasses.replace(target, prefix=target.prefix[:-1] + "16")
    fill(output / "checkpoint-16", SIZES)
    reply = backup(output, second)
    assert reply.copied == SIZES["shard-0.pt"] + SIZES["shard-1.pt"]
    prove(output, second, reply)


# -- pace --------------------------------------------------------------------------------------------------------


def test_the_cap_holds_for_all_threads_together(output, target):
    began = time.monotonic()
    reply = backup(output, target, bandwidth=4 << 20)
    seconds = time.monotonic() - began
    prove(output, target, reply)
    assert reply.sent / seconds < 1.2 * (4 << 20)


def test_progress_counts_each_byte_once(server, output, target):
    server.inject(kind="reset", after_bytes=100_000, operation="upload_part", times=5)
    pace = Pace()
    request = BackupRequest(str(output), "checkpoint-8", list(SIZES), target, "n1", part_size=PART)
    transfer.send(request, store.Keyring(target.credentials), pace)
    assert (pace.done, pace.total) == (sum(SIZES.values()), sum(SIZES.values()))
    assert pace.rate > 0
    assert pace.remaining_s == 0


def test_new_keys_are_used_from_the_next_request_on(output, target):
    keyring = store.Keyring(OssCredentials("LTAI-old", "gone"))
    keyring.replace(target.credentials)
    request = BackupRequest(str(output), "checkpoint-8", list(SIZES), target, "n1", part_size=PART)
    prove(output, target, transfer.send(request, keyring, Pace()))


# -- CRC64 and journals -------------------------------------------------------------------------------------------


@given(st.binary(max_size=5000), st.binary(max_size=5000))
def test_crcs_of_pieces_combine(first, second):
    one, other = crc64.update(0, first), crc64.update(0, bytearray(second))
    assert crc64.combine(one, other, len(second)) == crc64.update(0, memoryview(first + second))
    assert crc64.update(one, second) == crc64.update(0, first + second)


@settings(max_examples=20)
@given(st.binary(max_size=5000))
def test_crc_is_the_one_that_oss2_computes(data):
    import oss2

    theirs = oss2.utils.Crc64()
    theirs.update(data)
    assert crc64.update(0, data) == theirs.crc == crc64._from_oss2()(0, data)


@given(cut=st.integers(0, 200))
def test_a_torn_journal_loses_at_most_its_last_lines(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("journal") / "j.jsonl"
    journal = Journal(str(path))
    journal.begin({"key": "k"})
    for number in range(1, 6):
        journal.note(number, f"etag{number}", number * 7)
    data = path.read_bytes()
    path.write_bytes(data[: max(0, len(data) - cut)])
    parts = journal.parts()
    assert all(facts == [f"etag{number}", number * 7] for number, facts in parts.items())
    if journal.head() is not None:
        journal.note(9, "after", 1)
        assert journal.parts()[9] == ["after", 1]
