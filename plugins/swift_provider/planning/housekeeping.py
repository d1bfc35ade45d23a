"""Jobs on nodes against runs in Airflow: which job has no owner any more. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from trainer.protocol import JobState, Owner, Phase

#: States of a task instance that still means its training. A cleared one has no state until it is scheduled again.
OWNING_STATES = frozenset(
    {None, "none", "scheduled", "queued", "running", "deferred", "restarting", "up_for_retry", "up_for_reschedule"}
)


class Standing(StrEnum):
    """How a living job stands to Airflow."""

    OWNED = "owned"
    ORPHAN = "orphan"  # its task has ended, or its run is gone
    FOREIGN = "foreign"  # of another Airflow installation, or started by hand: not ours to judge


@dataclass(frozen=True)
class FoundJob:
    """A living job on a node, and how it stands. ``reason`` is for people."""

    cluster: str
    node: str
    state: JobState
    standing: Standing
    reason: str


def task_key(owner: Owner) -> tuple[str, str, str, int]:
    """What identifies a task instance."""
    return owner.dag_id, owner.run_id, owner.task_id, owner.map_index


def stand(
    cluster: str,
    node: str,
    state: JobState,
    task_states: Mapping[tuple[str, str, str, int], str | None],
    origin: str,
) -> FoundJob:
    """How a living job stands.

    Args:
        cluster: name of the cluster file.
        node: name of the node.
        state: of the job, as the node proved it.
        task_states: state of each known task instance of this Airflow; a key that is missing means "no such run".
        origin: this Airflow's name in leases.
    """
    owner = state.owner
    if owner.origin != origin:
        return FoundJob(cluster, node, state, Standing.FOREIGN, f"started by {owner.origin or 'somebody else'}")
    key = task_key(owner)
    if key not in task_states:
        return FoundJob(cluster, node, state, Standing.ORPHAN, "its run is gone")
    task_state = task_states[key]
    if task_state in OWNING_STATES:
        return FoundJob(cluster, node, state, Standing.OWNED, f"task is {task_state or 'about to start'}")
    return FoundJob(cluster, node, state, Standing.ORPHAN, f"task is {task_state}")


def is_living(state: JobState) -> bool:
    """The job holds its node; a lost one may have processes that do."""
    return state.phase in Phase.ALIVE or (state.phase == Phase.LOST and state.ended_at is None)
