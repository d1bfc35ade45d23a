"""Uploads while a gang trains, started over SSH as the train task does it; the backup task completes them."""

from __future__ import annotations

from typing import Any

from swift_provider.operators.mirror import mirror_while_training
from tests.cluster import stand_in
from tests.cluster.buckets import Run
from tests.cluster.sites import until
from tests.cluster.test_checkpoints import object_times
from tests.cluster.test_gang import start_all


def training(run: Run) -> Any:
    """A plan of a gang that trains until it is stopped, with the run's output folders and bucket."""
    return run.site.plan(
        checkpoints=run.plan.checkpoints.model_dump(),
        max_steps=10**6,
        save_steps=10**6,
        **stand_in.arguments(step_s=0.2),
    )


def test_what_was_sent_while_training_is_not_sent_again(run: Run) -> None:
    plan = training(run)
    job, _ = start_all(run.site, plan)
    mirror_while_training(plan, job)
    mirror_while_training(plan, job)  # as the next try of the task does: it hands over keys
    run.save(8)

    def states() -> dict[str, Any]:
        found: dict[str, Any] = run.site.with_group(plan, lambda group: run.site.gang(plan, group).states(job))
        return {name: state.mirror for name, state in found.items()}

    def is_safe() -> bool:
        mirror = states()["node1"]
        return mirror is not None and "checkpoint-8" in mirror.safe

    until(is_safe, 60)  # node1 has a part only, which counts as written when it has been quiet for 20 s
    mirror = states()["node1"]
    assert (mirror.error, mirror.done, mirror.total) == (None, mirror.sent, mirror.sent)
    early = object_times(run)
    assert "checkpoint-8/model.safetensors" in early
    assert run.manifests() == {}
    run.site.with_group(plan, lambda group: run.site.gang(plan, group).stop(job, "test"))
    run.site.with_group(plan, lambda group: run.site.gang(plan, group).wait_until_over(job))
    [result] = run.backup()
    assert result["name"] == "checkpoint-8"
    late = object_times(run)
    assert {key: late[key] for key in early} == early
    assert len(late) > len(early)  # node2's part, which it cannot judge alone, and the manifest


def test_without_a_bucket_that_answers_the_training_goes_on(run: Run) -> None:
    plan = training(run)
    job, phases = start_all(run.site, plan)
    run.server.inject(kind="status", status=403, code="AccessDenied", times=None)
    mirror_while_training(plan, job)
    run.save(8)

    def told() -> bool:
        states = run.site.with_group(plan, lambda group: run.site.gang(plan, group).states(job))
        mirror = states["node1"].mirror
        return mirror is not None and "AccessDenied" in (mirror.error or "")

    until(told, 60)
    after = run.site.with_group(plan, lambda group: run.site.gang(plan, group).states(job))
    assert {name: state.phase for name, state in after.items()} == phases
    run.site.with_group(plan, lambda group: run.site.gang(plan, group).stop(job, "test"))
    run.site.with_group(plan, lambda group: run.site.gang(plan, group).wait_until_over(job))
    run.server.faults.clear()
    assert [item["name"] for item in run.backup()] == ["checkpoint-8"]
