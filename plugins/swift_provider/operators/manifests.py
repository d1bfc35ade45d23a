"""What a manifest says of where a checkpoint comes from: recipe, plan, model, data, versions, run."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from airflow.sdk import Context

from swift_provider.operators.checkpoints import RunCheckpoint
from swift_provider.planning.plan import LaunchPlan
from swift_provider.settings import origin
from trainer.protocol import Manifest, OssTarget, StoredFile

#: XCom of the stage task: location of each input → SHA-256 over its names and contents.
XCOM_DIGESTS = "digests"

#: Arguments of ms-swift that name data.
_DATA = ("dataset", "val_dataset", "cached_dataset", "cached_val_dataset")


@dataclass(frozen=True)
class Origin:
    """What the run knows of itself. ``digests`` are those of staged inputs, by location."""

    versions: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    run_type: str = ""
    triggered_by: str = ""
    airflow: str = ""


def origin_of(context: Context, facts: Any, staged_by: str) -> Origin:
    """What can be told of the run that ``context`` belongs to.

    Args:
        context: of the backup task.
        facts: what the preflight task returned.
        staged_by: id of the stage task.
    """
    packages: dict[str, str | None] = next(iter((facts or {}).get("packages", {}).values()), {})
    ti, run = context.get("ti"), context.get("dag_run")
    digests = ti.xcom_pull(task_ids=staged_by, key=XCOM_DIGESTS) if ti is not None else None
    run_type = getattr(run, "run_type", None)
    return Origin(
        versions={name: version for name, version in packages.items() if version},
        digests=dict(digests or {}),
        run_type=str(getattr(run_type, "value", run_type) or ""),
        triggered_by=str(getattr(run, "triggering_user_name", None) or ""),
        airflow=origin(),
    )


def manifest_of(plan: LaunchPlan, checkpoint: RunCheckpoint, files: list[StoredFile], known: Origin) -> Manifest:
    """The manifest of a checkpoint whose files are all proven to be in the bucket."""
    judgement = checkpoint.judgement
    return Manifest(
        name=checkpoint.name,
        step=checkpoint.step,
        format=judgement.format,
        verdict=judgement.verdict,
        files=sorted(files, key=lambda file: file.path),
        metrics=dict(judgement.metrics),
        epoch=judgement.epoch,
        world_size=judgement.world_size,
        recipe=plan.recipe,
        recipe_hash=plan.recipe_hash,
        dag_id=plan.dag_id,
        run_id=plan.run_id,
        versions=known.versions,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        plan_hash=plan.digest(),
        cluster=plan.cluster,
        engine=plan.engine,
        model=str(plan.args.get("model") or ""),
        model_revision=str(plan.args.get("model_revision") or ""),
        model_digest=known.digests.get(str(plan.args.get("model") or ""), ""),
        datasets=_datasets(plan, known),
        run_type=known.run_type,
        triggered_by=known.triggered_by,
        origin=known.airflow,
    )


def mark_of(plan: LaunchPlan, known: Origin) -> dict[str, str]:
    """What ``run.json`` says: whose the run's folder in the bucket is."""
    return {"dag_id": plan.dag_id, "run_id": plan.run_id, "recipe": plan.recipe, "origin": known.airflow}


def claim(plan: LaunchPlan, target: OssTarget, known: Origin) -> str:
    """Say in the run's folder in the bucket whose it is, before the first file lies there.

    So nobody takes what arrives for garbage. Returns what went wrong; ``""``: nothing.
    """
    from trainer.store import StoreError, write_run

    try:
        write_run(target, mark_of(plan, known))
    except StoreError as error:
        return f"{target.url}: {error}"
    return ""


def _datasets(plan: LaunchPlan, known: Origin) -> dict[str, str]:
    """Each location of data in the plan's arguments, with the digest that stage found for it."""
    found: dict[str, str] = {}
    for name in _DATA:
        value = plan.args.get(name)
        for item in [value] if isinstance(value, str) else value or []:
            source = str(item)
            found[source] = known.digests.get(source) or known.digests.get(source.partition("#")[0], "")
    return found
