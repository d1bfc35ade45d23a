"""``prune``: what the policy lets go is deleted, on the nodes and in the bucket; each decision with its reason."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context

from swift_provider.exceptions import PruneFailed
from swift_provider.hooks.nodes import NodesHook
from swift_provider.hooks.oss import OSSHook
from swift_provider.operators.base import PlanConsumer, render_table
from swift_provider.operators.checkpoints import RunCheckpoint, gather_checkpoints
from swift_provider.planning.plan import LaunchPlan
from trainer.checkpoints.completeness import step_of
from trainer.protocol import Manifest, OssTarget, PruneReply, PruneRequest
from trainer.retention import Candidate, Decision, Policy, decide

if TYPE_CHECKING:
    from swift_provider.hooks.group import NodeGroup


class PruneOperator(PlanConsumer):
    """Applies ``checkpoints.keep_last`` and ``keep_best`` and returns ``{"nodes": […], "bucket": […]}``.

    Where a backup is configured, nothing goes from a node whose manifest is not in the bucket with the same files.
    With the run parameter ``prune_dry_run`` the table is printed and nothing is deleted.

    Args:
        plan: see :class:`~swift_provider.operators.base.PlanConsumer`.
    """

    def execute(self, context: Context) -> dict[str, list[dict[str, Any]]]:
        """See the class.

        Raises:
            PruneFailed: something could not be deleted; everything else was.
        """
        plan = self.launch_plan
        target = OSSHook(plan.checkpoints.oss_conn_id).target(plan.backup_prefix) if plan.backup_prefix else None
        group = NodesHook.for_plan(plan).group()
        manifests = _manifests(target)
        decisions, failures = asyncio.run(self._prune_nodes(plan, group, manifests))
        result = {"nodes": decisions}
        if target is not None:
            result["bucket"] = decide_bucket(plan, manifests)
        self.log.info("%s\n%s", "dry run: nothing is deleted" if plan.prune_dry_run else "pruning", render(result))
        if target is not None and not plan.prune_dry_run:
            failures += self._prune_bucket(target, result["bucket"])
        if failures:
            raise PruneFailed("could not be deleted\n" + "\n".join(failures))
        return {where: [asdict(decision) for decision in items] for where, items in result.items()}

    async def _prune_nodes(
        self, plan: LaunchPlan, group: NodeGroup, manifests: dict[str, Manifest]
    ) -> tuple[list[Decision], list[str]]:
        async with group:
            decisions = decide_nodes(plan, await gather_checkpoints(plan, group), manifests)
            delete = [decision.name for decision in decisions if not decision.keep]
            if not delete or plan.prune_dry_run:
                return decisions, []
            keep = [decision.name for decision in decisions if decision.keep]
            nodes = plan.nodes[:1] if plan.shared else plan.nodes
            requests = {node.name: PruneRequest(output_dir=node.output_dir, delete=delete, keep=keep) for node in nodes}
            replies, errors = await group.call_each("prune", requests, PruneReply, timeout=1800.0)
        failures = [f"{name}: {error}" for name, error in errors.items()]
        for name, reply in replies.items():
            failures += [f"{name}: {checkpoint}: {error}" for checkpoint, error in reply.errors.items()]
            self.log.info("%s: %s bytes freed", name, f"{sum(reply.deleted.values()):,}")
        return decisions, failures

    def _prune_bucket(self, target: OssTarget, decisions: list[Decision]) -> list[str]:
        from trainer.store import StoreError, delete_checkpoint

        failures = []
        for decision in decisions:
            if not decision.keep:
                try:
                    delete_checkpoint(replace(target, prefix=target.key(decision.name)))
                except StoreError as error:
                    failures.append(f"{target.url}/{decision.name}: {error}")
        return failures


def policy_of(plan: LaunchPlan, backup: bool) -> Policy:
    """The recipe's retention policy."""
    best = plan.checkpoints.keep_best
    return Policy(
        keep_last=plan.checkpoints.keep_last,
        keep_best=1 if best else 0,
        metric=best.metric if best else "",
        mode=best.mode if best else "min",
        backup=backup,
    )


def decide_nodes(plan: LaunchPlan, checkpoints: list[RunCheckpoint], manifests: dict[str, Manifest]) -> list[Decision]:
    """What goes from the nodes."""
    candidates = [
        Candidate(
            name=checkpoint.name,
            step=checkpoint.step,
            verdict=checkpoint.judgement.verdict,
            metrics=dict(checkpoint.judgement.metrics),
            verified=_agrees(manifests.get(checkpoint.name), checkpoint),
        )
        for checkpoint in checkpoints
    ]
    return decide(candidates, policy_of(plan, backup=plan.backup_prefix is not None))


def decide_bucket(plan: LaunchPlan, manifests: dict[str, Manifest]) -> list[Decision]:
    """What goes from the bucket: only what has a manifest counts there."""
    candidates = [
        Candidate(item.name, item.step, item.verdict, dict(item.metrics), verified=True) for item in manifests.values()
    ]
    return decide(candidates, policy_of(plan, backup=False))


def _agrees(manifest: Manifest | None, checkpoint: RunCheckpoint) -> bool:
    return manifest is not None and {file.path: file.size for file in manifest.files} == checkpoint.sizes


def _manifests(target: OssTarget | None) -> dict[str, Manifest]:
    if target is None:
        return {}
    from trainer.store import list_manifests

    # Exports lie beside the checkpoints, and are what the run was for.
    return {manifest.name: manifest for manifest in list_manifests(target) if step_of(manifest.name) is not None}


def render(result: dict[str, list[Decision]]) -> str:
    """The decisions as a table."""
    rows = [
        (where, decision.name, "keep" if decision.keep else "delete", decision.reason)
        for where, decisions in result.items()
        for decision in decisions
    ]
    return render_table(("where", "checkpoint", "decision", "reason"), rows)
