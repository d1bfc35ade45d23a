"""Retention over the nights of one recipe: the pinned, the used and the unproven stay, on nodes and in the bucket."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_provider.exceptions import BackupFailed, PruneFailed
from swift_provider.operators.backup import BackupOperator
from swift_provider.operators.prune import PruneOperator
from swift_provider.planning.plan import LaunchPlan
from tests.cluster.buckets import FACTS, NODES, Run
from tests.unit.trainer import layouts
from trainer import store
from trainer.manifest import LATEST, RUN

OVER_RUNS = {"backup": "oss://bucket/ckpt", "keep_last": 1, "keep_runs": 1}


class Ti:
    """The part of a task instance that asks Airflow: states by run, and what stage found."""

    def __init__(self, **states: str) -> None:
        self.states = states

    def get_task_states(self, dag_id: str, run_ids: list[str]) -> dict[str, dict[str, str]]:
        assert dag_id == "dag"
        return {name: {"prune": self.states[name]} for name in run_ids if name in self.states}

    def xcom_pull(self, task_ids: str, key: str) -> Any:
        return {"stand/in": "feed" * 16} if (task_ids, key) == ("stage", "digests") else None


def context(**states: str) -> Any:
    return {"ti": Ti(**states), "dag_run": SimpleNamespace(run_type="scheduled", triggering_user_name="ann")}


class Nights:
    """Runs of one recipe, each with its plan; every night saves, backs up and prunes."""

    def __init__(self, run: Run, **policy: Any) -> None:
        self.base, self.policy, self.plans = run, {**OVER_RUNS, **policy}, dict[str, LaunchPlan]()

    def night(self, name: str, *steps: int) -> Run:
        plan = self.base.site.plan(run_id=name, checkpoints=self.policy)
        night = Run(self.base.site, self.base.server, plan)
        for step in steps:
            night.save(step)
        self.plans[name] = plan
        dumped = plan.model_dump(mode="json")
        BackupOperator(task_id="backup", plan=dumped, facts=FACTS).execute(context())
        return night

    def prune(self, name: str, **states: str) -> dict[str, Any]:
        plan = self.plans[name].model_dump(mode="json")
        return PruneOperator(task_id="prune", plan=plan).execute(context(**states))  # type: ignore[return-value]

    def place(self, name: str, checkpoint: str = "") -> Any:
        prefix = "/".join(part for part in ("ckpt/dag", name, checkpoint) if part)
        return dataclasses.replace(self.base.target, prefix=prefix)

    def in_bucket(self) -> set[str]:
        return {"/".join(prefix.split("/")[2:]) for prefix in store.find_manifests(self.place(""))}

    def on_nodes(self) -> set[str]:
        """What both nodes hold the same of."""
        found = []
        for node in NODES:
            runs = self.base.folder(node).parent.parent
            found.append({f"{path.parent.parent.name[4:]}/{path.name}" for path in runs.glob("*/output/checkpoint-*")})
        assert found[0] == found[1]
        return found[0]


def test_the_newest_run_takes_the_place_of_the_older_ones(run: Run) -> None:
    nights = Nights(run)
    for name in ("one", "two", "three"):
        nights.night(name, 8, 16)
    states = {"one": "success", "two": "failed"}
    result = nights.prune("three", **states)
    assert nights.in_bucket() == nights.on_nodes() == {"three/checkpoint-16"}
    assert {(d["run"], d["keep"]) for d in result["nodes"] if d["step"] == 16} == {
        ("ckpt/dag/one", False), ("ckpt/dag/two", False), ("ckpt/dag/three", True),
    }  # fmt: skip
    assert all(not d["keep"] or d["reason"] for d in nights.prune("three", **states)["bucket"])


def test_a_run_under_way_an_unknown_one_and_a_pin_hold_theirs(run: Run) -> None:
    nights = Nights(run)
    for name in ("busy", "strange", "over"):
        nights.night(name, 8, 16)
    store.pin(nights.place("over", "checkpoint-8"), {"by": "ann"})
    nights.night("last", 8)
    result = nights.prune("last", busy="deferred", over="success")
    held = {"busy/checkpoint-8", "busy/checkpoint-16", "strange/checkpoint-8", "strange/checkpoint-16"}
    assert nights.in_bucket() == nights.on_nodes() == held | {"over/checkpoint-8", "last/checkpoint-8"}
    reasons = {(d["run"].rpartition("/")[2], d["step"]): d["reason"] for d in result["bucket"]}
    assert reasons["busy", 8] == "its run is under way (prune is deferred)"
    assert reasons["strange", 8].startswith("its run is not known to this Airflow")
    assert reasons["over", 8] == "pinned"


def test_nothing_goes_from_a_node_whose_objects_are_not_the_manifests(run: Run) -> None:
    nights = Nights(run)
    for name in ("one", "two"):
        nights.night(name, 8, 16)
    bucket = store.open_bucket(run.target)
    bucket.put_object("ckpt/dag/one/checkpoint-8/scheduler.pt", b"S")  # as large as it was, and another
    bucket.delete_object("ckpt/dag/one/checkpoint-16/scheduler.pt")
    nights.prune("two", one="success")
    assert nights.on_nodes() == {"one/checkpoint-8", "one/checkpoint-16", "two/checkpoint-16"}


def test_each_place_has_its_own_rules(run: Run) -> None:
    nights = Nights(run, keep_runs=None, nodes={"keep_runs": 1}, bucket={"keep_last": 2})
    for name in ("one", "two"):
        nights.night(name, 8, 16, 24)
    nights.prune("two", one="success")
    assert nights.on_nodes() == {"two/checkpoint-24"}
    # no rule of the bucket counts over runs, so the other run is left as it is
    assert nights.in_bucket() == {f"one/checkpoint-{n}" for n in (8, 16, 24)} | {
        "two/checkpoint-16",
        "two/checkpoint-24",
    }


def test_a_pin_that_comes_during_the_prune_is_respected(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    nights = Nights(run)
    nights.night("one", 8, 16)
    real = PruneOperator._delete_in_bucket

    def late(self: Any, *given: Any) -> Any:
        store.pin(nights.place("one", "checkpoint-8"), {"by": "ann"})
        return real(self, *given)

    monkeypatch.setattr(PruneOperator, "_delete_in_bucket", late)
    with pytest.raises(PruneFailed, match="is pinned"):
        nights.prune("one")
    assert "one/checkpoint-8" in nights.in_bucket()


# -- what backup leaves ---------------------------------------------------------------------------------------------


def test_the_manifest_tells_where_the_checkpoint_comes_from(run: Run) -> None:
    nights = Nights(run)
    night = nights.night("one", 8, 16)
    manifest = store.latest(nights.place("one"))
    assert manifest is not None
    assert (manifest.name, manifest.model, manifest.cluster) == ("checkpoint-16", "stand/in", "c")
    assert manifest.datasets == {"stand/in": "feed" * 16}
    assert (manifest.run_type, manifest.triggered_by, manifest.run_id) == ("scheduled", "ann", "one")
    assert manifest.plan_hash == night.plan.digest()
    assert store.read_run(nights.place("one"))["run_id"] == "one"
    names = {item.key.rpartition("/")[2] for item in store.list_objects(store.open_bucket(run.target), "ckpt/dag/one/")}
    assert {LATEST, RUN} <= names


def test_what_a_manifest_speaks_of_is_never_overwritten(run: Run) -> None:
    nights = Nights(run)
    night = nights.night("one", 8)
    before = store.read_manifest(nights.place("one", "checkpoint-8"))
    assert before is not None
    model = night.folder("node1") / "checkpoint-8" / "model.safetensors"
    model.write_bytes(layouts.safetensors(300_000)[:-1] + b"\2")  # as large as before, another training
    plan = night.plan.model_dump(mode="json")
    with pytest.raises(
        BackupFailed,
        match=r"checkpoint-8.*model.safetensors is another file than the one",
    ):
        BackupOperator(task_id="backup", plan=plan, facts=FACTS).execute(context())
    assert store.verify(nights.place("one", "checkpoint-8"), before) == {}
    (night.folder("node1") / "checkpoint-8" / "note.txt").write_text("one file more")
    with pytest.raises(BackupFailed, match="already holds another checkpoint-8; nothing was sent"):
        BackupOperator(task_id="backup", plan=plan, facts=FACTS).execute(context())


def test_objects_are_stored_as_the_recipe_says(run: Run) -> None:
    storage = {"encryption": "KMS", "kms_key_id": "k-1", "storage_class": "IA", "tags": {"team": "llm", "cost": 7}}
    nights = Nights(run, storage=storage)
    nights.night("one", 8)
    bucket = store.open_bucket(run.target)
    for item in store.list_objects(bucket, "ckpt/dag/one/"):
        headers = bucket.head_object(item.key).headers
        assert headers["x-oss-server-side-encryption"] == "KMS", item.key
        assert headers["x-oss-server-side-encryption-key-id"] == "k-1"
        assert headers["x-oss-storage-class"] == "IA"
        assert bucket.get_object_tagging(item.key).tag_set.tagging_rule == {"team": "llm", "cost": "7"}


def test_the_agent_deletes_nothing_that_a_living_job_uses(run: Run, tmp_path: Path) -> None:
    nights = Nights(run)
    nights.night("one", 8, 16)
    nights.night("two", 8)
    source = nights.plans["one"].nodes[0].output_dir + "/checkpoint-8"
    plan = run.site.plan(run_id="user", max_steps=10_000, save_steps=10_000, resume_from_checkpoint=source)
    run.site.start(plan)
    with pytest.raises(PruneFailed, match=r"in use: job .* was started with it"):
        nights.prune("two", one="success")
    kept = Path(nights.plans["one"].nodes[0].output_dir)
    assert [path.name for path in kept.glob("checkpoint-*")] == ["checkpoint-8"]
