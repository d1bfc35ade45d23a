"""What the states of a gang's jobs mean together, and what follows. Pure: the operator and the trigger act on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from trainer.protocol import JobState, Phase, StopReason

#: A job that ended for one of these is a cause; one that was stopped for another reason is a consequence.
ROOT_REASONS = frozenset({None, StopReason.RANK_FAILED, StopReason.SIGNAL, StopReason.DEADLINE})
#: The stop reason of a start that went wrong elsewhere; also seen by another controller that follows the same gang.
START_FAILED = "the gang could not start"


@dataclass(frozen=True)
class GangHandle:
    """What a train task remembers over its tries; stored before the first byte goes to a node.

    ``deadline`` is in seconds since the epoch. ``plan_hash`` tells a cleared task with a new plan from a retry.
    ``resumed_step`` is the step that the generation started from, ``idle`` how many generations before it ended
    without a newer complete checkpoint.
    """

    generation: int
    job_id: str
    plan_hash: str
    deadline: float | None = None
    finished: bool = False
    resumed_step: int = 0
    idle: int = 0

    def to_json(self) -> dict[str, Any]:
        """As stored in Airflow's task state."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Self | None:
        """The stored handle, or ``None`` where nothing is stored."""
        return cls(**value) if value else None


class Step(StrEnum):
    """What the train task does next."""

    JOIN = "join"  # start on every node: attaches where the job is, starts where it is not yet
    WAIT = "wait"  # a stop is under way; look again when it is over
    FINISHED = "finished"  # every job ended well
    NEXT = "next"  # end what is left and start the next generation


def next_step(states: Mapping[str, JobState]) -> Step:
    """What follows from the proven states of the handle's generation, one per node."""
    phases = {state.phase for state in states.values()}
    if all(ended_well(state) for state in states.values()):
        return Step.FINISHED
    if Phase.STOPPING in phases:
        return Step.WAIT
    ended_badly = any(state.phase in Phase.ENDED and not ended_well(state) for state in states.values())
    absent_beside_ended = Phase.ABSENT in phases and Phase.EXITED in phases
    if ended_badly or absent_beside_ended:
        return Step.NEXT
    return Step.JOIN


def ended_well(state: JobState) -> bool:
    """The training process ended by itself with exit status 0."""
    return state.phase == Phase.EXITED and state.exit_code == 0


def first_failure(states: Mapping[str, JobState]) -> tuple[str, JobState] | None:
    """The node whose job ended badly first; jobs that were stopped because of it do not count before it."""
    failed = [(name, state) for name, state in states.items() if state.phase in Phase.ENDED and not ended_well(state)]
    if not failed:
        return None
    return min(failed, key=lambda item: (not is_root(item[1]), item[1].ended_at or float("inf")))


def is_root(state: JobState) -> bool:
    """The end is a cause, no consequence; a lost job was lost whatever reason its burial was given."""
    return state.phase == Phase.LOST or state.stop_reason in ROOT_REASONS


def describe_end(node: str, state: JobState) -> str:
    """How a job ended, in a few words."""
    if state.phase == Phase.LOST:
        words = "its supervisor is gone (reboot, power-off or kill -9)"
    elif state.stop_reason == StopReason.RANK_FAILED:
        words = "a rank died"
    elif state.stop_reason == StopReason.SIGNAL:
        words = "the machine was shut down, or somebody ended the supervisor"
    elif state.stop_reason:
        words = f"stopped ({state.stop_reason})"
    elif state.signal:
        words = f"ended by signal {state.signal}"
    else:
        words = f"exit status {state.exit_code}"
    return f"{node}: {words}" + (f": {state.error}" if state.error else "")


def cancel_reason(try_number: int) -> str:
    """The stop reason of a user's cancel; the try tells a cleared task's successor that it was not meant."""
    return f"cancelled in try {try_number}"


def cancelled_try(reason: str | None) -> int | None:
    """The try that a stop reason of :func:`cancel_reason` names."""
    head, _, number = (reason or "").rpartition(" ")
    return int(number) if head == "cancelled in try" and number.isdigit() else None


def cancelled_earlier(states: Mapping[str, JobState], try_number: int) -> bool:
    """A cancel that was meant for a try before ``try_number`` has reached the gang on at least one node."""
    tries = [cancelled_try(state.stop_reason) for state in states.values()]
    return any(cancelled is not None and cancelled < try_number for cancelled in tries)
