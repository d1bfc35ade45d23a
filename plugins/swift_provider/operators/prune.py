"""``prune``: what the policy lets go is deleted, on the nodes and in the bucket; each decision with its reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context

from swift_provider.exceptions import PruneFailed
from swift_provider.hooks.nodes import NodesHook
from swift_provider.operators.base import PlanConsumer, render_table
from swift_provider.operators.checkpoints import RunCheckpoint, gather_checkpoints
from swift_provider.operators.recipe_runs import Bucket, bucket_candidate, look, other_runs_in_use
from swift_provider.planning.plan import LaunchPlan
from swift_provider.planning.retention import RunId, created_at, policy_of, sees_other_runs
from trainer.protocol import JobsReply, JobsRequest, JobState, PruneReply, PruneRequest
from trainer.retention import Candidate, Decision, decide, over_budget

if TYPE_CHECKING:
    from swift_provider.hooks.group import NodeGroup

DELETE_TIMEOUT_S = 1800.0  # for one node to delete the checkpoints of one run


@dataclass(frozen=True)
class Facts:
    """What a decision rests on. ``used`` says which other runs may still need theirs; ``now`` in seconds."""

    plan: LaunchPlan
    bucket: Bucket | None
    used: dict[RunId, str]
    now: float

    @property
    def own(self) -> str:
        """This run's name among candidates: its prefix in the bucket."""
        return self.bucket.own if self.bucket else ""


class PruneOperator(PlanConsumer):
    """Applies the rules of the recipe's ``checkpoints`` and returns ``{"nodes": […], "bucket": […]}``.

    Rules that count over all runs look at every run of the recipe that has checkpoints in the bucket, also on the
    nodes; without such a rule only this run's are looked at. Where a backup is configured, nothing goes from a node
    whose objects have not just been compared, by CRC64, with their manifest in the bucket.
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
        group = NodesHook.for_plan(plan).group()
        bucket = look(plan)
        result, failures = asyncio.run(self._prune(plan, group, bucket, context.get("ti")))
        if failures:
            raise PruneFailed("could not be deleted\n" + "\n".join(failures))
        return {where: [asdict(decision) for decision in items] for where, items in result.items()}

    async def _prune(
        self, plan: LaunchPlan, group: NodeGroup, bucket: Bucket | None, ti: Any
    ) -> tuple[dict[str, list[Decision]], list[str]]:
        async with group:
            jobs = await _jobs(group)
            now = time.time()
            used = await asyncio.to_thread(other_runs_in_use, bucket, plan, ti, jobs, now) if bucket else {}
            facts = Facts(plan, bucket, used, now)
            runs = await _runs_on_nodes(facts, group)
            decisions = await asyncio.to_thread(decide_nodes, facts, runs)
            result = {"nodes": decisions}
            if bucket is not None:
                result["bucket"] = decide_bucket(facts)
            self._tell(plan, result)
            if plan.prune_dry_run:
                return result, []
            failures = await self._delete_on_nodes(facts, group, runs, decisions)
        if bucket is not None:
            failures += self._delete_in_bucket(bucket, result["bucket"])
        return result, failures

    def _tell(self, plan: LaunchPlan, result: dict[str, list[Decision]]) -> None:
        self.log.info("%s\n%s", "dry run: nothing is deleted" if plan.prune_dry_run else "pruning", render(result))
        for where, decisions in result.items():
            policy = policy_of(plan.checkpoints, "bucket" if where == "bucket" else "nodes")
            more = over_budget(decisions, policy)
            if more:
                self.log.warning(
                    "%s: %s bytes more than max_gib stay, because protected checkpoints hold them", where, f"{more:,}"
                )

    async def _delete_on_nodes(
        self, facts: Facts, group: NodeGroup, runs: dict[str, Run], decisions: list[Decision]
    ) -> list[str]:
        failures = []
        for prefix, run in runs.items():
            own = [decision for decision in decisions if decision.run == prefix]
            delete = [decision.name for decision in own if not decision.keep]
            if not delete:
                continue
            keep = [decision.name for decision in own if decision.keep]
            nodes = run.plan.nodes[:1] if run.plan.shared else run.plan.nodes
            requests = {
                node.name: PruneRequest(node.output_dir, delete=delete, keep=keep, workdir=node.workdir)
                for node in nodes
            }
            replies, errors = await group.call_each("prune", requests, PruneReply, timeout=DELETE_TIMEOUT_S)
            failures += [f"{name}: {error}" for name, error in errors.items()]
            for name, reply in replies.items():
                failures += [f"{name}: {checkpoint}: {error}" for checkpoint, error in reply.errors.items()]
                self.log.info("%s: %s bytes freed of run %s", name, f"{sum(reply.deleted.values()):,}", run.plan.run_id)
        return failures

    def _delete_in_bucket(self, bucket: Bucket, decisions: list[Decision]) -> list[str]:
        from trainer.store import StoreError, delete_checkpoint

        failures = []
        for decision in decisions:
            if not decision.keep:
                place = replace(bucket.root, prefix=f"{decision.run}/{decision.name}")
                try:
                    delete_checkpoint(place)
                except StoreError as error:
                    failures.append(f"{place.url}: {error}")
        return failures


@dataclass(frozen=True)
class Run:
    """A run's checkpoints on the nodes, and the plan whose nodes have its output folders."""

    plan: LaunchPlan
    checkpoints: list[RunCheckpoint]


async def _jobs(group: NodeGroup) -> list[JobState]:
    requests = {name: JobsRequest(workdir=session.workdir) for name, session in group.sessions.items()}
    replies = await group.call_all("jobs", requests, JobsReply)
    return [job for reply in replies.values() for job in reply.jobs]


async def _runs_on_nodes(facts: Facts, group: NodeGroup) -> dict[str, Run]:
    """This run's checkpoints, and those of earlier runs where a rule counts them, by the run's prefix."""
    plan, bucket = facts.plan, facts.bucket
    runs = {facts.own: Run(plan, await gather_checkpoints(plan, group))}
    if bucket is not None and sees_other_runs(policy_of(plan.checkpoints, "nodes")):
        for folder in bucket.folders:
            if folder.run_prefix not in runs and folder.manifest is not None:
                other = plan.for_run(folder.manifest.dag_id, folder.manifest.run_id)
                runs[folder.run_prefix] = Run(other, await gather_checkpoints(other, group))
    return runs


def decide_nodes(facts: Facts, runs: dict[str, Run]) -> list[Decision]:
    """What goes from the nodes.

    Whatever is to go is compared with the bucket first, object by object; what is not whole there stays.
    """
    policy = policy_of(facts.plan.checkpoints, "nodes")
    candidates = {
        item.key: item
        for prefix, run in runs.items()
        for item in (_node_candidate(facts, prefix, run.plan, checkpoint) for checkpoint in run.checkpoints)
    }
    while True:
        decisions = decide(list(candidates.values()), policy, facts.now, facts.own)
        going = [candidates[decision.key] for decision in decisions if not decision.keep]
        broken = [item for item in going if policy.backup and item.usable and not _is_proven(facts, item)]
        if not broken:
            return decisions
        for item in broken:
            candidates[item.key] = replace(item, verified=False)


def decide_bucket(facts: Facts) -> list[Decision]:
    """What goes from the bucket: only what has a manifest counts there."""
    bucket = facts.bucket
    if bucket is None:
        return []
    policy = policy_of(facts.plan.checkpoints, "bucket")
    wide = sees_other_runs(policy)
    candidates = [
        bucket_candidate(folder, facts.used.get((manifest.dag_id, manifest.run_id), ""), created_at(manifest))
        for folder in bucket.folders
        if (manifest := folder.manifest) is not None and (wide or folder.run_prefix == facts.own)
    ]
    return decide(candidates, policy, facts.now, facts.own)


def _node_candidate(facts: Facts, prefix: str, plan: LaunchPlan, checkpoint: RunCheckpoint) -> Candidate:
    folder = facts.bucket.find(prefix, checkpoint.name) if facts.bucket else None
    manifest = folder.manifest if folder else None
    agrees = (
        folder is not None
        and manifest is not None
        and {file.path: file.size for file in manifest.files} == checkpoint.sizes
        and not folder.lacking()
    )
    return Candidate(
        name=checkpoint.name,
        step=checkpoint.step,
        verdict=checkpoint.judgement.verdict,
        metrics=dict(checkpoint.judgement.metrics),
        pinned=folder is not None and folder.pinned,
        verified=agrees,
        run=prefix,
        created=checkpoint.modified,
        size=checkpoint.size,
        in_use=facts.used.get((plan.dag_id, plan.run_id), ""),
    )


def _is_proven(facts: Facts, item: Candidate) -> bool:
    from trainer.store import verify

    folder = facts.bucket.find(item.run, item.name) if facts.bucket else None
    if facts.bucket is None or folder is None or folder.manifest is None:
        return False
    return not verify(replace(facts.bucket.root, prefix=folder.prefix), folder.manifest)


def render(result: dict[str, list[Decision]]) -> str:
    """The decisions as a table; the run is told where there are several."""
    several: Sequence[str] = sorted({decision.run for decisions in result.values() for decision in decisions})
    head = ("where", "run", "checkpoint", "decision", "reason")
    rows = [
        (where, decision.run, decision.name, "keep" if decision.keep else "delete", decision.reason)
        for where, decisions in result.items()
        for decision in decisions
    ]
    if len(several) <= 1:
        return render_table(head[:1] + head[2:], [row[:1] + row[2:] for row in rows])
    return render_table(head, rows)
