"""All runs of a recipe that have checkpoints in its bucket, and which of them may still need theirs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from swift_provider.hooks.oss import OSSHook
from swift_provider.planning.plan import LaunchPlan
from swift_provider.planning.retention import RunId, flatten, runs_in_use
from trainer.checkpoints.completeness import step_of
from trainer.protocol import JobState, Manifest, OssTarget, Phase, Verdict
from trainer.retention import Candidate
from trainer.store import Folder, survey

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bucket:
    """What the recipe's place in the bucket holds. ``root`` is ``checkpoints.backup``, ``own`` this run's prefix."""

    root: OssTarget
    own: str
    folders: list[Folder]

    def manifests(self) -> list[Manifest]:
        """Of all folders that have one that can be read."""
        return [folder.manifest for folder in self.folders if folder.manifest is not None]

    def find(self, run: str, name: str) -> Folder | None:
        """The checkpoint ``name`` of the run with that prefix."""
        return next((f for f in self.folders if (f.run_prefix, f.name) == (run, name)), None)


def look(plan: LaunchPlan) -> Bucket | None:
    """The checkpoints of the plan's recipe, of all its runs; ``None`` without a backup.

    A manifest that cannot be read or trusted is told in the log; its checkpoint is left alone.

    Raises:
        StoreError: the bucket cannot be listed.
    """
    if plan.checkpoints.backup is None or plan.backup_prefix is None:
        return None
    hook = OSSHook(plan.checkpoints.oss_conn_id)
    root, own = hook.target(plan.checkpoints.backup), hook.target(plan.backup_prefix)
    folders = survey(root)
    for folder in folders:
        if folder.error:
            log.warning("%s", folder.error)
    # Exports lie beside the checkpoints, and are what the run was for: no rule is about them.
    recipes = [
        f
        for f in folders
        if f.manifest is not None and f.manifest.recipe == plan.recipe and step_of(f.name) is not None
    ]
    return Bucket(root, own.prefix, recipes)


def other_runs_in_use(
    bucket: Bucket, plan: LaunchPlan, ti: Any, jobs: Iterable[JobState], now: float
) -> dict[RunId, str]:
    """Which other runs may still need their checkpoints, by DAG and run id, each with the reason.

    Args:
        bucket: what is there.
        plan: of the run that asks.
        ti: the running task, which asks Airflow for the states of the other runs; ``None``: nobody can be asked.
        jobs: the jobs on the nodes.
        now: seconds since the epoch.
    """
    runs = {(item.dag_id, item.run_id) for item in bucket.manifests()} - {(plan.dag_id, plan.run_id)}
    used = runs_in_use(bucket.manifests(), states_of(ti, runs), (plan.dag_id, plan.run_id), now)
    for job in jobs:
        owner = (job.owner.dag_id, job.owner.run_id)
        if job.phase in Phase.ALIVE and owner in runs:
            used[owner] = f"its job {job.job_id} is on a node"
    return used


def states_of(ti: Any, runs: Iterable[RunId]) -> dict[RunId, dict[str, str | None]]:
    """The states of the tasks of each run, as far as this Airflow knows them.

    Args:
        ti: the running task, which asks; ``None``: nobody can be asked.
        runs: DAG and run ids; one without either is nobody's.
    """
    known = {run for run in runs if all(run)}
    found: dict[RunId, dict[str, str | None]] = {}
    for dag in sorted({dag for dag, _ in known}) if ti is not None else []:
        answer = flatten(ti.get_task_states(dag_id=dag, run_ids=sorted(run for of, run in known if of == dag)))
        found |= {(dag, run): tasks for run, tasks in answer.items()}
    return found


def bucket_candidate(folder: Folder, in_use: str, created: float | None) -> Candidate:
    """A checkpoint in the bucket as retention sees it. Its run is its folder's prefix."""
    manifest = folder.manifest
    if manifest is None:
        raise ValueError(f"{folder.prefix} holds no checkpoint: there is no manifest")
    return Candidate(
        name=folder.name,
        step=manifest.step,
        verdict=Verdict.DAMAGED if folder.lacking() else manifest.verdict,
        metrics=dict(manifest.metrics),
        pinned=folder.pinned,
        verified=True,
        run=folder.run_prefix,
        created=created,
        size=folder.size,
        in_use=in_use,
    )
