"""What in the bucket is garbage: the remains of uploads that nobody will finish. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swift_provider.planning.names import safe_name
from swift_provider.planning.retention import UNKNOWN_RUN_S, RunId, under_way
from trainer.store import Leftover

#: The least grace (seconds): an upload that failed is tried again within this time.
LEAST_GRACE_S = 3600.0


@dataclass(frozen=True)
class Fate:
    """Whether a remainder goes, and one line that says why."""

    delete: bool
    reason: str


def judge(
    leftover: Leftover,
    states: Mapping[RunId, Mapping[str, str | None]],
    on_nodes: Collection[RunId],
    now: float,
    grace_s: float,
) -> Fate:
    """What to do with the remains of one upload.

    Args:
        leftover: what lies there, and whose it is as far as its run has said.
        states: the states of the tasks of each run that this Airflow knows.
        on_nodes: the runs that have a living job on a node.
        now: seconds since the epoch, by the same clock as the objects' times.
        grace_s: how long nothing of it must have come, in seconds.
    """
    run = (leftover.run.get("dag_id", ""), leftover.run.get("run_id", ""))
    age = now - leftover.touched
    hours = f"nothing came for {age / 3600:.1f} h"
    if run in on_nodes or _folder(leftover) in {f"{safe_name(dag)}/{safe_name(name)}" for dag, name in on_nodes}:
        return Fate(False, "its run has a job on a node")
    if run in states:
        reason = under_way(states[run])
        if reason:
            return Fate(False, reason)
        wait, whose = max(grace_s, LEAST_GRACE_S), "its run has ended"
    else:
        wait, whose = max(grace_s, UNKNOWN_RUN_S), "its run is not known to this Airflow"
    if age < wait:
        return Fate(False, f"{whose}; {hours}, and the grace is {wait / 3600:g} h")
    return Fate(True, f"{whose}; {hours}")


def _folder(leftover: Leftover) -> str:
    """The DAG's and the run's part of the place, where ``run.json`` is missing."""
    return "/".join(leftover.prefix.split("/")[-3:-1])
