"""What is found in a bucket beside the checkpoints, and what is never taken for garbage."""

from __future__ import annotations

import dataclasses

import pytest

from swift_provider.planning.cleanup import judge
from tests.unit.provider.archive import Archive
from tests.unit.trainer.oss import prefix_of
from trainer import store
from trainer.manifest import RUN

HOUR = 3600.0


@pytest.fixture
def archive(server, tmp_path, request) -> Archive:
    return Archive.at(server, prefix_of(request), tmp_path)


def begin(archive: Archive, path: str) -> str:
    """A multipart upload with one part, never ended."""
    bucket, key = store.open_bucket(archive.target), archive.place(path).prefix
    upload_id = bucket.init_multipart_upload(key).upload_id
    bucket.upload_part(key, upload_id, 1, b"p" * 100)
    return str(upload_id)


def test_only_what_has_no_manifest_is_found(archive: Archive) -> None:
    archive.save("one", 8)
    archive.save("one", 16, manifest=False)
    store.write_run(archive.place("dag/one"), {"dag_id": "dag", "run_id": "one"})
    bucket = store.open_bucket(archive.target)
    bucket.put_object(archive.place("notes/readme.txt").prefix, b"somebody's own")
    [found] = store.find_leftovers(archive.target)
    assert found.prefix.endswith("dag/one/checkpoint-16")
    assert (len(found.keys), found.uploads, found.run["run_id"]) == (2, [], "one")
    assert found.touched > 1.7e9
    assert store.remove(archive.target, found) == 2
    assert {key.split("/")[2] for key in archive.objects() if key.startswith("dag/")} == {"checkpoint-8", RUN}
    assert "notes/readme.txt" in archive.objects()


def test_dead_uploads_are_found_beside_a_checkpoint_and_alone(archive: Archive) -> None:
    archive.save("one", 8)
    begin(archive, "dag/one/checkpoint-8/model.safetensors")
    begin(archive, "dag/two/checkpoint-8/model.safetensors")
    begin(archive, "dag/two/somebodys-own")
    found = {item.prefix.rpartition("dag/")[2]: item for item in store.find_leftovers(archive.target)}
    assert set(found) == {"one/checkpoint-8", "two/checkpoint-8"}
    for item in found.values():
        store.remove(archive.target, item)
    assert store.find_leftovers(archive.target) == []
    assert "dag/one/checkpoint-8/model.safetensors" in archive.objects()
    left = store.open_bucket(archive.target).list_multipart_uploads(prefix=archive.target.prefix).upload_list
    assert [item.key.rpartition("/")[2] for item in left] == ["somebodys-own"]


def test_what_became_a_checkpoint_meanwhile_is_left_alone(archive: Archive) -> None:
    made = archive.save("one", 8, manifest=False)
    [found] = store.find_leftovers(archive.target)
    store.write_manifest(archive.place("dag/one/checkpoint-8"), made)
    with pytest.raises(store.StoreError, match="has become a checkpoint"):
        store.remove(archive.target, found)
    assert store.verify(archive.place("dag/one/checkpoint-8"), made) == {}


def test_a_manifest_that_cannot_be_read_makes_no_garbage(archive: Archive) -> None:
    archive.save("one", 8)
    place = archive.place("dag/one/checkpoint-8")
    store.open_bucket(place).put_object(place.key("manifest.json"), b'{"schema_version": 99}')
    assert store.find_leftovers(archive.target) == []


def test_a_prefix_is_a_folder_and_not_the_beginning_of_a_name(archive: Archive) -> None:
    archive.save("one", 8, manifest=False)
    begin(archive, "dag/one/checkpoint-8/x")
    shorter = dataclasses.replace(archive.target, prefix=archive.target.prefix[:-1])
    assert store.find_leftovers(shorter) == []
    assert store.survey(shorter) == []


# -- the judge ------------------------------------------------------------------------------------------------------

RUN_ID = ("dag", "one")


def leftover(hours: float, known: bool = True) -> store.Leftover:
    run = {"dag_id": "dag", "run_id": "one"} if known else {}
    return store.Leftover("p/dag/one/checkpoint-8", run, ["k"], 1, 1e9 - hours * HOUR)


@pytest.mark.parametrize(
    ("hours", "known", "states", "on_nodes", "delete", "reason"),
    [
        (30, True, {RUN_ID: {"backup": "failed"}}, set(), True, "its run has ended; nothing came for 30.0 h"),
        (20, True, {RUN_ID: {"backup": "failed"}}, set(), False, "the grace is 24 h"),
        (300, True, {RUN_ID: {"backup": "running"}}, set(), False, "backup is running"),
        (300, True, {RUN_ID: {"backup": None}}, set(), False, "backup is to come"),
        (300, True, {RUN_ID: {"backup": "failed"}}, {RUN_ID}, False, "has a job on a node"),
        (300, False, {}, {RUN_ID}, False, "has a job on a node"),
        (30, True, {}, set(), False, "not known to this Airflow"),
        (30, False, {}, set(), False, "the grace is 168 h"),
        (170, False, {}, set(), True, "not known"),
    ],
)
def test_what_is_garbage(hours, known, states, on_nodes, delete, reason) -> None:
    fate = judge(leftover(hours, known), states, on_nodes, 1e9, 24 * HOUR)
    assert fate.delete is delete
    assert reason in fate.reason


def test_no_grace_is_too_short() -> None:
    assert not judge(leftover(0.5), {RUN_ID: {"backup": "failed"}}, set(), 1e9, 0).delete
