"""Backup and prune of a run whose nodes share no disk: each holds a part of every checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from swift_provider.exceptions import BackupFailed, TrainingError
from tests.cluster.buckets import NODES, SECRET, Run
from trainer.store import open_bucket


def test_the_manifest_is_the_union_and_each_file_goes_once(run: Run) -> None:
    content = run.save(8)
    [result] = run.backup()
    assert (result["name"], result["files"]) == ("checkpoint-8", len(content))
    assert result["url"] == "oss://bucket/ckpt/dag/run/checkpoint-8"
    assert result["bytes"] == sum(map(len, content.values()))
    manifest = run.manifests()["checkpoint-8"]
    assert {file.path: file.size for file in manifest.files} == {name: len(data) for name, data in content.items()}
    assert len(manifest.files) == len({file.path for file in manifest.files})
    assert {file.node for file in manifest.files} == set(NODES)
    assert manifest.world_size == 2
    assert manifest.versions["ms-swift"] == "4.6.0"
    objects = run.objects()
    del objects["checkpoint-8/manifest.json"]
    assert objects == {f"checkpoint-8/{name}": data for name, data in content.items()}
    stamps = object_times(run)
    run.backup()  # again: nothing is sent twice
    after = object_times(run)
    assert {key for key in stamps if stamps[key] != after[key]} <= {"checkpoint-8/manifest.json"}


def object_times(run: Run) -> dict[str, Any]:
    bucket = open_bucket(run.target)
    listing = bucket.list_objects_v2(prefix=f"{run.target.prefix}/checkpoint-", max_keys=1000).object_list
    keys = [item.key for item in listing]
    return {key.removeprefix(f"{run.target.prefix}/"): bucket.head_object(key).headers["Last-Modified"] for key in keys}


def test_a_half_written_checkpoint_stays_out_of_the_bucket(run: Run) -> None:
    run.save(8)
    run.save(9)
    (run.folder("node2") / "checkpoint-9" / "rng_state_1.pth").unlink()
    assert [item["name"] for item in run.backup()] == ["checkpoint-8"]
    assert not [key for key in run.objects() if key.startswith("checkpoint-9/")]


def test_after_a_nodes_error_a_retry_sends_only_what_is_missing(run: Run) -> None:
    content = run.save(8)
    broken = run.folder("node2") / "checkpoint-8" / "global_step8" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    key = "ckpt/dag/run/checkpoint-8/global_step8/zero_pp_rank_1_mp_rank_00_model_states.pt"
    run.server.inject(kind="status", method="PUT", key=key, status=403, code="AccessDenied", times=None)
    with pytest.raises(BackupFailed) as caught:
        run.backup()
    assert "checkpoint-8: node2: " in str(caught.value)
    assert broken.name in str(caught.value)
    assert SECRET not in str(caught.value)
    assert not run.manifests(), "a manifest speaks of whole checkpoints only"
    sent = set(run.objects())
    assert sent == {f"checkpoint-8/{name}" for name in content if not name.endswith(broken.name)}
    stamps = object_times(run)
    run.server.faults.clear()
    run.backup()
    after = object_times(run)
    assert {name for name in sent if after[name] != stamps[name]} == set()
    assert len(run.manifests()["checkpoint-8"].files) == len(content)


def test_a_node_that_is_down_makes_no_judgement_and_deletes_nothing(run: Run) -> None:
    for step in (8, 16, 24):
        run.save(step)
    run.backup()
    run.site.publish("node2", port=1)
    for work in (run.backup, run.prune):
        with pytest.raises(TrainingError) as caught:
            work()
        assert "node2" in str(caught.value)
    assert run.on_disk("node1") == {"checkpoint-8", "checkpoint-16", "checkpoint-24"}


def test_prune_keeps_newest_and_best_on_both_nodes_and_in_the_bucket(run: Run) -> None:
    for step in (8, 16, 24):
        run.save(step)
    run.backup()
    best = {name: manifest.metrics["eval_loss"] for name, manifest in run.manifests().items()}
    wanted = {"checkpoint-24", min(best, key=lambda name: best[name])}
    tried = run.prune(prune_dry_run=True)  # decides and deletes nothing
    assert any(not item["keep"] for item in tried["nodes"])
    assert any(not item["keep"] for item in tried["bucket"])
    assert len(run.on_disk("node1")) == len(run.on_disk("node2")) == len(run.manifests()) == 3
    decisions = run.prune()
    assert {item["name"] for item in decisions["nodes"] if item["keep"]} == wanted
    assert run.on_disk("node1") == run.on_disk("node2") == wanted
    assert set(run.manifests()) == wanted
    assert {key.split("/")[0] for key in run.objects()} == wanted


def test_prune_never_deletes_what_is_not_verified_in_the_bucket(run: Run) -> None:
    for step in (8, 16, 24):
        run.save(step)
    run.backup()
    bucket = open_bucket(run.target)
    bucket.delete_object("ckpt/dag/run/checkpoint-8/manifest.json")
    larger = run.folder("node2") / "checkpoint-16" / "rng_state_1.pth"
    larger.write_bytes(b"another state than the one in the bucket")
    decisions = {item["name"]: item for item in run.prune()["nodes"]}
    for name in ("checkpoint-8", "checkpoint-16"):
        assert decisions[name]["keep"], decisions[name]
        for node in NODES:
            assert name in run.on_disk(node)


def test_backup_without_a_bucket_is_no_error(run: Run) -> None:
    run.save(8)
    policy = run.plan.checkpoints.model_copy(update={"backup": None})
    assert run.backup(checkpoints=policy) == []
