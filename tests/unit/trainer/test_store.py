"""Backup, fetch, stage and manifests against a server that speaks the OSS protocol, with real networks' faults."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.unit.trainer.oss import BUCKET, KEY_ID, SECRET
from trainer import protocol, store, transfer
from trainer.manifest import ManifestError, decode, encode, is_plain
from trainer.protocol import (
    BackupRequest,
    FetchRequest,
    Manifest,
    OssCredentials,
    StagedItem,
    StageItem,
    StageReply,
    StageRequest,
    StoredFile,
)
from trainer.stage import stage
from trainer.store import client, download, upload

PART = 128 * 1024


@pytest.fixture
def target(place, monkeypatch):
    monkeypatch.setattr(upload, "MULTIPART_FROM", 2 * PART)
    monkeypatch.setattr(download, "PART", PART)
    return place


@pytest.fixture
def output(tmp_path):
    """An output folder with one checkpoint: small files, one file of several parts, an empty one."""
    folder = tmp_path / "out" / "checkpoint-8"
    (folder / "global_step8").mkdir(parents=True)
    (folder / "global_step8" / "shard 0 中.pt").write_bytes(
        bytes(range(256)) * (5 * PART // 256) + b"the odd last 17 b"
    )
    (folder / "latest").write_text("global_step8")
    (folder / "empty").touch()
    return folder.parent


PATHS = ["global_step8/shard 0 中.pt", "latest", "empty"]


def backup(output, target, paths=PATHS, **more):
    return transfer.backup(
        BackupRequest(str(output), "checkpoint-8", list(paths), target, "node1", part_size=PART, **more)
    )


def manifest_of(reply, **more) -> Manifest:
    return Manifest("checkpoint-8", 8, "full+ddp", "complete", reply.files, **more)


# -- backup -----------------------------------------------------------------------------------------------------


def test_backup_proves_each_file_and_sends_nothing_twice(output, target):
    reply = backup(output, target)
    assert reply.errors == {}
    assert [(file.path, file.node) for file in reply.files] == [(path, "node1") for path in PATHS]
    assert reply.sent == 5 * PART + 17 + 12
    for file in reply.files:
        path = output / "checkpoint-8" / file.path
        assert (file.size, file.crc64) == (path.stat().st_size, store.crc64_of(str(path)))
    again = backup(output, target)
    assert (again.sent, again.files) == (0, reply.files)


def test_a_changed_file_is_sent_again(output, target):
    backup(output, target)
    (output / "checkpoint-8" / "latest").write_text("global_step9")
    assert backup(output, target).sent == 12


def test_one_file_that_fails_does_not_keep_the_others(output, target):
    reply = backup(output, target, ["latest", "missing", "../../etc/passwd", "empty"])
    assert [file.path for file in reply.files] == ["latest", "empty"]
    assert "No such file" in reply.errors["missing"]
    assert "refused" in reply.errors["../../etc/passwd"]


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "status": 500, "times": 3},
        {"kind": "throttle", "times": 2},
        {"kind": "reset", "after_bytes": 1000, "method": "PUT", "times": 2},
        {"kind": "lost_reply", "method": "PUT", "times": 2},
        {"kind": "lost_reply", "method": "POST", "times": 1},
        {"kind": "wrong_crc", "operation": "head_object", "skip": 1, "times": 1},
    ],
    ids=lambda fault: fault["kind"] + fault.get("method", ""),
)
def test_passing_faults_do_not_show(server, output, target, fault):
    server.inject(**fault)
    reply = backup(output, target)
    assert reply.errors == {}
    assert len(reply.files) == len(PATHS)


def test_a_crc_that_stays_wrong_is_an_error(server, output, target):
    server.inject(kind="wrong_crc", operation="head_object", times=None)
    reply = backup(output, target, ["latest"])
    assert reply.files == []
    assert "other bytes" in reply.errors["latest"]


def test_an_interrupted_transfer_goes_on_where_it_stopped(server, output, target, monkeypatch):
    server.inject(kind="status", status=403, code="AccessDenied", operation="upload_part", skip=3, times=None)
    first = backup(output, target, PATHS[:1], threads=1)
    assert "AccessDenied" in first.errors[PATHS[0]]
    server.faults.clear()
    parts = []
    import oss2

    real = oss2.Bucket.upload_part
    monkeypatch.setattr(oss2.Bucket, "upload_part", lambda *a, **k: (parts.append(a[3]), real(*a, **k))[1])
    assert backup(output, target, PATHS[:1], threads=1).errors == {}
    assert sorted(parts) == [4, 5, 6]


def test_wrong_keys_are_told_at_once_and_never_shown(output, target):
    wrong = dataclasses.replace(target, credentials=OssCredentials("LTAI-other", "other-secret"))
    reply = backup(output, wrong, ["latest"])
    assert "InvalidAccessKeyId" in reply.errors["latest"]
    wrong = dataclasses.replace(target, credentials=OssCredentials(KEY_ID, "other-secret"))
    reply = backup(output, wrong, ["latest"])
    assert "SignatureDoesNotMatch" in reply.errors["latest"]
    assert "other-secret" not in str(reply)
    assert KEY_ID not in str(reply)


@pytest.mark.parametrize(
    ("size", "wanted", "part"), [(1, 10 << 20, 10 << 20), (10**12, 10 << 20, 96 << 20), (0, 1, 102400)]
)
def test_parts_grow_where_ten_thousand_would_not_do(size, wanted, part):
    assert upload.part_size_for(size, wanted) == part
    assert part * upload.MAX_PARTS >= size


# -- manifests ----------------------------------------------------------------------------------------------------


def test_only_what_has_a_manifest_exists(output, target):
    reply = backup(output, target)
    parent = dataclasses.replace(target, prefix=target.prefix.rpartition("/")[0])
    assert store.list_manifests(parent) == []
    assert store.read_manifest(target) is None
    manifest = manifest_of(reply, metrics={"eval_loss": 0.5}, run_id="nightly__1", versions={"ms-swift": "4.6.0"})
    store.write_manifest(target, manifest)
    assert store.find_manifests(parent) == {target.prefix: manifest}
    assert store.list_manifests(parent) == [manifest]
    assert store.verify(target, manifest) == {}


def test_the_same_manifest_twice_is_fine_and_another_is_a_conflict(server, output, target):
    manifest = manifest_of(backup(output, target))
    server.inject(kind="lost_reply", method="PUT", times=1)
    store.write_manifest(target, manifest)
    store.write_manifest(target, dataclasses.replace(manifest, run_id="another"))
    other = dataclasses.replace(manifest, files=[StoredFile("latest", 12, "1")])
    with pytest.raises(store.ManifestConflictError, match="already holds another checkpoint-8"):
        store.write_manifest(target, other)
    assert store.read_manifest(target) == manifest


def test_verify_names_what_is_wrong(output, target):
    manifest = manifest_of(backup(output, target))
    bucket = store.open_bucket(target)
    bucket.delete_object(target.key("empty"))
    bucket.put_object(target.key("latest"), b"something else")
    wrong = store.verify(target, manifest)
    assert wrong["empty"] == "is not there"
    assert "has size 14" in wrong["latest"]
    assert len(wrong) == 2


def test_delete_takes_the_manifest_first(server, output, target):
    store.write_manifest(target, manifest_of(backup(output, target)))
    bystander = dataclasses.replace(target, prefix=target.prefix + "0")
    backup(output, bystander, ["latest"])
    server.inject(kind="status", status=403, code="AccessDenied", operation="delete_multiple_objects", times=None)
    with pytest.raises(store.StoreError, match="AccessDenied"):
        store.delete_checkpoint(target)
    assert store.read_manifest(target) is None
    server.faults.clear()
    assert store.delete_checkpoint(target) == 3
    left = [item.key for item in store.list_objects(store.open_bucket(target), target.prefix)]
    assert left == [bystander.key("latest")]
    with pytest.raises(store.StoreError, match="whole bucket"):
        store.delete_checkpoint(dataclasses.replace(target, prefix=""))


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"schema_version": 2},
        {"files": [StoredFile("../x", 1, "1")]},
        {"files": [StoredFile("a", -1, "1")]},
        {"files": [StoredFile("a", 1, "x")]},
        {"files": [StoredFile("a", 1, "1"), StoredFile("a", 1, "1")]},
        {"files": [StoredFile("manifest.json", 1, "1")]},
    ],
)
def test_a_manifest_that_cannot_be_trusted_is_refused(change):
    good = Manifest("checkpoint-8", 8, "full", "complete", [StoredFile("a", 1, "1")])
    assert decode(encode(good)) == good
    bad = dataclasses.replace(good, **change)
    with pytest.raises(ManifestError):
        encode(bad)
    with pytest.raises(ManifestError):
        decode(json.dumps(protocol.to_dict(bad)).encode())


def test_plain_paths():
    assert all(map(is_plain, ["a", "a/b.c", "..a", "中 文"]))
    assert not any(map(is_plain, ["", "/a", "a/", "a//b", "./a", "a/../b", "..", "a\\b", "a\0"]))


def test_listing_goes_over_pages(target):
    bucket = store.open_bucket(target)
    for number in range(7):
        bucket.put_object(target.key(f"{number}"), b"")
    real = bucket.list_objects_v2
    bucket.list_objects_v2 = lambda **given: real(**{**given, "max_keys": 3})
    assert [item.key[-1] for item in store.list_objects(bucket, target.prefix)] == list("0123456")


# -- fetch ----------------------------------------------------------------------------------------------------------


def fetch(target, destination):
    return transfer.fetch(FetchRequest(target, str(destination)))


def test_fetch_brings_the_same_bytes_and_knows_what_is_there(output, target, tmp_path):
    store.write_manifest(target, manifest_of(backup(output, target)))
    destination = tmp_path / "node2" / "checkpoint-8"
    reply = fetch(target, destination)
    assert (reply.error, reply.files, reply.size) == (None, 3, 5 * PART + 17 + 12)
    for path in PATHS:
        assert (destination / path).read_bytes() == (output / "checkpoint-8" / path).read_bytes()
    assert fetch(target, destination).error is None
    (destination / "latest").write_text("global_step9")
    assert "latest has another content" in fetch(target, destination).error
    assert sorted(path.name for path in (tmp_path / "node2").iterdir()) == [".checkpoint-8.lock", "checkpoint-8"]


def test_a_broken_fetch_shows_nothing_and_goes_on(server, output, target, tmp_path, monkeypatch):
    store.write_manifest(target, manifest_of(backup(output, target)))
    destination = tmp_path / "node2" / "checkpoint-8"
    monkeypatch.setattr(client, "ATTEMPTS", 1)
    server.inject(kind="reset", method="GET", key="*shard*", after_bytes=3 * PART, direction="sent", times=1)
    assert "shard" in fetch(target, destination).error
    assert not destination.exists()
    monkeypatch.undo()
    assert fetch(target, destination).error is None
    assert (destination / PATHS[0]).read_bytes() == (output / "checkpoint-8" / PATHS[0]).read_bytes()


def test_a_reset_in_the_middle_resumes_by_range(server, output, target, tmp_path):
    store.write_manifest(target, manifest_of(backup(output, target)))
    server.inject(kind="reset", method="GET", key="*shard*", after_bytes=3 * PART, direction="sent", times=2)
    assert fetch(target, tmp_path / "node2" / "checkpoint-8").error is None


def test_fetch_refuses_what_is_not_whole(output, target, tmp_path):
    assert "there is no manifest" in fetch(target, tmp_path / "x").error
    manifest = manifest_of(backup(output, target))
    store.write_manifest(target, manifest)
    store.open_bucket(target).put_object(target.key("latest"), b"global_step7")
    assert "CRC64" in fetch(target, tmp_path / "x").error
    assert not (tmp_path / "x").exists()
    assert "absolute" in fetch(target, "relative").error


# -- stage from the bucket ------------------------------------------------------------------------------------------


def test_stage_brings_objects_once(server, target, tmp_path):
    bucket = store.open_bucket(target)
    for name in ("model/config.json", "model/sub/weights.bin", "data.jsonl"):
        bucket.put_object(target.key(name), name.encode() * 1000)
    root = f"oss://{BUCKET}/{target.prefix}"
    items = [StageItem("model", f"{root}/model/", target), StageItem("data", f"{root}/data.jsonl", target)]
    items += [StageItem("missing", f"{root}/nothing", target), StageItem("no folder", f"{root}/nothing/", target)]
    request = StageRequest(str(tmp_path / "work"), items)
    model, data, missing, empty = stage(request).items
    assert (model.error, model.files, Path(model.path).name) == (None, 2, "model")
    assert (data.error, data.size, data.fetched) == (None, 10_000, 10_000)
    assert (Path(model.path) / "sub" / "weights.bin").read_bytes() == b"model/sub/weights.bin" * 1000
    assert "slash at its end" in missing.error
    assert "nothing lies below" in empty.error
    warm = stage(request).items
    assert [item.fetched for item in warm] == [0] * 4
    assert [item.digest for item in warm[:2]] == [model.digest, data.digest]
    bucket.put_object(target.key("data.jsonl"), b"new")
    newer = stage(request).items[1]
    assert (newer.fetched, newer.path != data.path) == (3, True)


def test_the_same_content_from_bucket_and_disk_has_one_digest(target, tmp_path):
    store.open_bucket(target).put_object(target.key("data.jsonl"), b"{}\n")
    (tmp_path / "elsewhere.jsonl").write_bytes(b"{}\n")
    items = [StageItem("a", f"oss://{BUCKET}/{target.prefix}/data.jsonl", target)]
    items += [StageItem("b", str(tmp_path / "elsewhere.jsonl"))]
    first, second = stage(StageRequest(str(tmp_path / "work"), items)).items
    assert first.digest == second.digest


# -- over the wire --------------------------------------------------------------------------------------------------


def test_secrets_stay_in_the_request(node, output, target):
    """The verb as the control side runs it; neither output nor anything on disk holds a secret."""
    request = BackupRequest(str(output), "checkpoint-8", ["latest", "missing"], target, "node1")
    done = node.verb("backup", request)
    assert done.returncode == 0, done.stderr
    reply = protocol.loads(protocol.BackupReply, done.stdout)
    assert [file.path for file in reply.files] == ["latest"]
    item = StageItem("data", f"oss://{BUCKET}/{target.prefix}/latest", target)
    staged = protocol.loads(StageReply, node.verb("stage", StageRequest(node.workdir, [item])).stdout)
    assert isinstance(staged.items[0], StagedItem)
    assert staged.items[0].error is None
    texts = [done.stdout, done.stderr, repr(request)]
    for root in (output, Path(node.workdir)):
        texts += [path.read_bytes().decode("utf-8", "replace") for path in root.rglob("*") if path.is_file()]
    assert not [text for text in texts if SECRET in text]
