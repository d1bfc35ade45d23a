"""The recipe's retention rules over what nodes and bucket hold: pure, from facts to candidates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal

from swift_provider.config.checkpoints import CheckpointPolicy
from swift_provider.planning.housekeeping import OWNING_STATES
from trainer.protocol import Manifest
from trainer.retention import Policy

#: A run that this Airflow does not know may be another Airflow's: for so long (seconds) its checkpoints are in use.
UNKNOWN_RUN_S = 7 * 86400.0

Where = Literal["nodes", "bucket"]
RunId = tuple[str, str]


def policy_of(checkpoints: CheckpointPolicy, where: Where) -> Policy:
    """The rules for one place. On the nodes nothing goes that a configured backup has not yet."""
    rules = checkpoints.retention(where)
    best = rules.keep_best
    return Policy(
        keep_last=rules.keep_last,
        keep_best=best.count if best else 0,
        metric=best.metric if best else "",
        mode=best.mode if best else "min",
        backup=where == "nodes" and checkpoints.backup is not None,
        keep_runs=rules.keep_runs or 0,
        keep_every=rules.keep_every or 0,
        keep_daily=rules.keep_daily,
        keep_weekly=rules.keep_weekly,
        keep_monthly=rules.keep_monthly,
        keep_within=rules.keep_within,
        max_bytes=int((rules.max_gib or 0) * 2**30),
    )


def sees_other_runs(policy: Policy) -> bool:
    """Whether a rule counts over all runs of the recipe; without one, other runs stay as they are."""
    return bool(
        policy.keep_runs
        or policy.keep_daily
        or policy.keep_weekly
        or policy.keep_monthly
        or policy.keep_within
        or policy.max_bytes
    )


def created_at(manifest: Manifest) -> float | None:
    """When the manifest was written, in seconds since the epoch; ``None`` when it does not say."""
    try:
        return datetime.fromisoformat(manifest.created_at).timestamp()
    except ValueError:
        return None


def runs_in_use(
    manifests: Iterable[Manifest], states: Mapping[RunId, Mapping[str, str | None]], own: RunId, now: float
) -> dict[RunId, str]:
    """Which other runs may still need their checkpoints, each with the reason.

    Args:
        manifests: of any runs.
        states: the states of the tasks of each run that this Airflow knows.
        own: the run that asks; it is not among them.
        now: seconds since the epoch.
    """
    newest: dict[RunId, float] = {}
    for item in manifests:
        run = (item.dag_id, item.run_id)
        newest[run] = max(newest.get(run, 0.0), created_at(item) or 0.0)
    found: dict[RunId, str] = {}
    for run, made in newest.items():
        if run == own:
            continue
        if run in states:
            reason = under_way(states[run])
            if reason:
                found[run] = reason
        elif now - made < UNKNOWN_RUN_S:
            found[run] = "its run is not known to this Airflow, and it is younger than 7 days"
    return found


def under_way(tasks: Mapping[str, str | None]) -> str:
    """Why a run with these states of its tasks may still need what it made; ``""``: it has ended."""
    active = sorted(task for task, state in tasks.items() if state in OWNING_STATES)
    return f"its run is under way ({active[0]} is {tasks[active[0]] or 'to come'})" if active else ""


def flatten(answer: Mapping[str, Any]) -> dict[str, dict[str, str | None]]:
    """Airflow's answer about task states as run id → task → state."""
    return {run: dict(tasks) for run, tasks in answer.items() if isinstance(tasks, Mapping)}
