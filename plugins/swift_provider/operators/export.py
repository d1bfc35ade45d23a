"""``export``: a merged or quantized model of the run's newest or best checkpoint, proven whole, in the bucket."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from airflow.sdk import Context

from swift_provider.exceptions import ExportFailed
from swift_provider.hooks.nodes import NodesHook
from swift_provider.hooks.oss import OSSHook
from swift_provider.operators.backup import UPLOAD_TIMEOUT_S
from swift_provider.operators.checkpoints import gather_checkpoints
from swift_provider.operators.gang import Gang
from swift_provider.operators.train import TrainOperator
from swift_provider.planning.export import choose_checkpoint, export_plan, node_with
from swift_provider.planning.gang import GangHandle
from swift_provider.planning.launch import Resume
from swift_provider.planning.plan import LaunchPlan
from trainer.checkpoints import weights
from trainer.checkpoints.judgement import Files
from trainer.protocol import (
    BackupReply,
    BackupRequest,
    CheckpointListing,
    CheckpointsReply,
    CheckpointsRequest,
    JobState,
    Manifest,
    Phase,
    PruneReply,
    PruneRequest,
    Verdict,
    from_dict,
)

#: Key in Airflow's task state of the checkpoint that this task has chosen.
SOURCE_KEY = "source"


@dataclass(frozen=True)
class Source:
    """The checkpoint that is exported: where it lies, and what its manifest says of it."""

    node: str
    name: str
    step: int
    format: str
    metrics: dict[str, float]


class ExportOperator(TrainOperator):
    """Runs ``swift export`` as a job on one node that holds the checkpoint, under its lease, deferred like a training.

    The result lies beside the run's checkpoints, in ``…/export/checkpoint-N``, and counts only when every file of the
    model is there and its headers agree. Then it is sent to ``<backup>/<dag>/<run>/export-N``, proven file by file,
    with its manifest written last. Does nothing where the recipe has no ``export``.

    Args:
        plan: see :class:`~swift_provider.operators.base.PlanConsumer`.
        staged: what ``StageOperator`` returned.
    """

    _source: Source | None = None

    @property
    def launch_plan(self) -> LaunchPlan:
        """The plan of the one job; that of the training until the checkpoint is chosen."""
        plan = super().launch_plan
        if self._source is None:
            return plan
        node = next(node for node in plan.nodes if node.name == self._source.node)
        return export_plan(plan, node, self._source.name, adapter=self._source.format.startswith("adapter"))

    def execute(self, context: Context) -> Any:
        """Chooses the checkpoint, starts or finds the job, then defers.

        Raises:
            ExportFailed: there is no such checkpoint, or no node holds all of it.
            TrainingError: see :class:`~swift_provider.operators.train.TrainOperator`.
        """
        self._source = None
        plan = self.launch_plan
        if plan.export is None:
            # Not skipped: that would skip the prune as well, which has to tell a good run from a dry one.
            self.log.info("recipe %s has no export; there is nothing to do", plan.recipe)
            return None
        self._source = asyncio.run(self._choose(plan))
        context["task_state_store"].set(SOURCE_KEY, asdict(self._source))
        self.log.info("exporting %s of %s with %s", self._source.name, self._source.node, plan.export.args)
        result = super().execute(context)  # comes back only where the job has ended well already
        return self._finish(context, result)

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """The trigger's event becomes the proven result.

        Raises:
            ExportFailed: files are missing, broken, or not proven to be in the bucket.
            TrainingError: see :class:`~swift_provider.operators.train.TrainOperator`.
        """
        self._source = from_dict(Source, context["task_state_store"].get(SOURCE_KEY))
        return self._finish(context, super().execute_complete(context, event))

    async def _choose(self, plan: LaunchPlan) -> Source:
        group = self._group(plan)
        async with group:
            checkpoints = await gather_checkpoints(plan, group)
        wanted = plan.export.checkpoint if plan.export else "newest"
        chosen = choose_checkpoint(plan, checkpoints)
        if chosen is None:
            states = "; ".join(f"{item.name} is {item.judgement.verdict}" for item in checkpoints)
            raise ExportFailed(
                f"the run has no whole checkpoint ({wanted} is wanted): {states or 'it has none at all'}"
            )
        node = node_with(plan, chosen)
        if node is None:
            raise ExportFailed(f"{chosen.name}: no node holds all of its weights; a shared_dir would")
        judgement = next(item.judgement for item in checkpoints if item.name == chosen.name)
        return Source(node.name, chosen.name, chosen.step, judgement.format, dict(judgement.metrics))

    # -- a job's result begins from nothing: ms-swift takes a folder that is there for a finished one -------------

    async def _join(self, gang: Gang, handle: GangHandle, resume: Resume | None) -> bool:
        states = await gang.states(handle.job_id)
        if {state.phase for state in states.values()} == {Phase.ABSENT}:
            await _clear(gang)
        return await super()._join(gang, handle, resume)

    async def _next_generation(
        self, context: Context, plan: LaunchPlan, handle: GangHandle, gang: Gang, states: Mapping[str, JobState]
    ) -> tuple[GangHandle, Resume | None]:
        found = await super()._next_generation(context, plan, handle, gang, states)
        await _clear(gang)
        return found

    # -- what the job has made --------------------------------------------------------------------------------

    def _finish(self, context: Context, result: Mapping[str, Any]) -> dict[str, Any]:
        plan, source = self.launch_plan, self._source
        if source is None:
            raise ExportFailed("no checkpoint was chosen")
        listing = asyncio.run(self._listing(plan, source))
        problems = faults_of(listing)
        if problems:
            # The next try must start anew and not find that its job has ended well.
            self._store(context, replace(self._load_handle(context, plan), plan_hash="result is not whole"))
            raise ExportFailed(f"{plan.nodes[0].output_dir} on {source.node} is not whole: {'; '.join(problems)}")
        sizes = {entry.path: entry.size for entry in listing.files}
        summary = {
            "checkpoint": source.name,
            "node": source.node,
            "path": plan.nodes[0].output_dir,
            "files": len(sizes),
            "bytes": sum(sizes.values()),
            "job_id": result["job_id"],
            "url": None,
        }
        if plan.backup_prefix is None:
            self.log.info("the recipe names no backup (checkpoints.backup); the result stays on %s", source.node)
            return summary
        return summary | {"url": self._send(plan, source, list(sizes))}

    async def _listing(self, plan: LaunchPlan, source: Source) -> CheckpointListing:
        group = self._group(plan)
        async with group:
            request = CheckpointsRequest(output_dir=posixpath.dirname(plan.nodes[0].output_dir))
            replies = await group.call_all("checkpoints", {source.node: request}, CheckpointsReply)
        listings: list[CheckpointListing] = replies[source.node].checkpoints
        return next((item for item in listings if item.name == source.name), CheckpointListing(source.name))

    def _send(self, plan: LaunchPlan, source: Source, paths: list[str]) -> str:
        from trainer.store import StoreError, write_manifest

        name = f"export-{source.step}"
        whole = OSSHook(plan.checkpoints.oss_conn_id).target(str(plan.backup_prefix), plan.checkpoints.storage)
        target = replace(whole, prefix=whole.key(name))
        group = NodesHook.for_plan(plan).group()
        node = plan.nodes[0]
        request = BackupRequest(
            output_dir=posixpath.dirname(node.output_dir),
            checkpoint=source.name,
            files=paths,
            target=target,
            node=node.name,
            state_dir=posixpath.join(node.workdir, "uploads"),
        )

        async def send() -> BackupReply:
            async with group:
                replies = await group.call_all("backup", {node.name: request}, BackupReply, timeout=UPLOAD_TIMEOUT_S)
            return replies[node.name]

        reply = asyncio.run(send())
        if reply.errors:
            raise ExportFailed("not in the bucket\n" + "\n".join(f"{p}: {e}" for p, e in reply.errors.items()))
        manifest = Manifest(
            name=name,
            step=source.step,
            format=weights.FULL,
            verdict=Verdict.WEIGHTS_ONLY,
            files=sorted(reply.files, key=lambda file: file.path),
            metrics=source.metrics,
            recipe=plan.recipe,
            recipe_hash=plan.recipe_hash,
            dag_id=plan.dag_id,
            run_id=plan.run_id,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        try:
            write_manifest(target, manifest)
        except StoreError as error:
            raise ExportFailed(f"{name}: manifest: {error}") from None
        self.log.info("%s: %d files proven in %s, %s bytes sent now", name, len(paths), target.url, f"{reply.sent:,}")
        return target.url


def faults_of(listing: CheckpointListing) -> list[str]:
    """What a model in Hugging Face form lacks; empty when it is whole."""
    if not listing.files:
        return ["the folder is missing or empty"]
    return [finding.text for finding in weights.check(Files(listing), weights.FULL)]


async def _clear(gang: Gang) -> None:
    """Removes what an earlier try has left where the result will be.

    Raises:
        ExportFailed: it could not be removed.
    """
    node = gang.plan.nodes[0]
    folder, name = posixpath.split(node.output_dir)
    request = PruneRequest(output_dir=folder, delete=[name])
    replies = await gang.group.call_all("prune", {node.name: request}, PruneReply, timeout=1800.0)
    errors = replies[node.name].errors
    if errors:
        raise ExportFailed(f"{node.name}: {node.output_dir} is in the way: {errors[name]}")
