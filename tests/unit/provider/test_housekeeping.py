"""Which jobs on nodes have an owner in Airflow."""

from __future__ import annotations

import pytest

from swift_provider.planning.housekeeping import Standing, is_living, stand, task_key
from trainer.protocol import JobState, Owner, Phase

OURS = Owner("dag", "run", "train", -1, 1, "http://us")
THEIRS = Owner("dag", "run", "train", -1, 1, "http://them")


def job(owner: Owner, phase: str = Phase.RUNNING) -> JobState:
    return JobState("j", phase, owner=owner)


@pytest.mark.parametrize(
    ("owner", "states", "standing"),
    [
        (OURS, {task_key(OURS): "deferred"}, Standing.OWNED),
        (OURS, {task_key(OURS): "running"}, Standing.OWNED),
        (OURS, {task_key(OURS): "up_for_retry"}, Standing.OWNED),
        (OURS, {task_key(OURS): None}, Standing.OWNED),
        (OURS, {task_key(OURS): "failed"}, Standing.ORPHAN),
        (OURS, {task_key(OURS): "success"}, Standing.ORPHAN),
        (OURS, {task_key(OURS): "removed"}, Standing.ORPHAN),
        (OURS, {}, Standing.ORPHAN),
        (THEIRS, {}, Standing.FOREIGN),
        (Owner(), {}, Standing.FOREIGN),
    ],
)
def test_standing(owner: Owner, states: dict[tuple[str, str, str, int], str | None], standing: Standing) -> None:
    found = stand("c", "n", job(owner), states, "http://us")
    assert found.standing is standing
    assert found.reason


def test_what_lives() -> None:
    living = {phase for phase in (*Phase.ALIVE, *Phase.ENDED) if is_living(job(OURS, phase))}
    assert living == {Phase.PREPARING, Phase.RUNNING, Phase.STOPPING, Phase.LOST}
    assert not is_living(JobState("j", Phase.LOST, ended_at=1.0))
