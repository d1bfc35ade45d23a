"""``stage``: models and datasets are on every node, whole and equal."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from airflow.sdk import Context
from airflow.sdk.exceptions import AirflowSkipException

from swift_provider.exceptions import StageFailed
from swift_provider.hooks.nodes import NodesHook
from swift_provider.hooks.oss import OSSHook
from swift_provider.operators.base import PlanConsumer
from swift_provider.operators.manifests import XCOM_DIGESTS, Origin, claim
from swift_provider.planning.plan import LaunchPlan
from swift_provider.settings import origin
from trainer.protocol import OssTarget, StagedItem, StageItem, StageReply, StageRequest

if TYPE_CHECKING:
    from swift_provider.hooks.group import NodeGroup


class StageOperator(PlanConsumer):
    """Puts every input of the plan on every node and returns where it lies: ``{node: {location: path}}``.

    A path must exist on each node; an ``oss://`` location is downloaded into the node's cache, once. Contents are
    compared between the nodes by digest. A dry run ends here, green, with the rest skipped.

    Args:
        plan: see :class:`~swift_provider.operators.base.PlanConsumer`.
    """

    def execute(self, context: Context) -> dict[str, dict[str, str]]:
        """See the class.

        Raises:
            StageFailed: something is missing, could not be fetched, or differs between nodes; all of it at once.
        """
        plan = self.launch_plan
        if plan.dry_run:
            raise AirflowSkipException("dry run: plan and preflight are done, nothing is staged or trained")
        targets = self._targets(plan)
        group = NodesHook.for_plan(plan).group()
        replies = asyncio.run(_stage(plan, group, targets))
        problems = [
            f"{name}: {item.source}: {item.error}"
            for name, reply in replies.items()
            for item in reply.items
            if item.error
        ] + compare_digests({name: reply.items for name, reply in replies.items()})
        if problems:
            raise StageFailed("inputs are not in place\n" + "\n".join(problems))
        for name, reply in replies.items():
            for item in reply.items:
                how = f"{item.fetched:,} bytes fetched" if item.fetched else "was there"
                self.log.info(
                    "%s: %s → %s (%d files, %s bytes, %s)", name, item.source, item.path, item.files, item.size, how
                )
        self._claim(plan)
        digests = {item.source: item.digest for reply in replies.values() for item in reply.items}
        context["ti"].xcom_push(key=XCOM_DIGESTS, value=digests)
        return {name: {item.source: item.path for item in reply.items} for name, reply in replies.items()}

    def _claim(self, plan: LaunchPlan) -> None:
        """Whoever cannot write to the bucket learns it now, and not after the training, which goes on all the same."""
        if plan.backup_prefix is not None:
            target = OSSHook(plan.checkpoints.oss_conn_id).target(plan.backup_prefix, plan.checkpoints.storage)
            problem = claim(plan, target, Origin(airflow=origin()))
            if problem:
                self.log.warning("nothing can be mirrored at present; backup will try again: %s", problem)

    def _targets(self, plan: LaunchPlan) -> dict[str, OssTarget]:
        hook = OSSHook(plan.checkpoints.oss_conn_id)
        return {source: hook.target(source) for source in plan.inputs if source.startswith("oss://")}


async def _stage(plan: LaunchPlan, group: NodeGroup, targets: dict[str, OssTarget]) -> dict[str, StageReply]:
    items = [
        StageItem(name=f"input{index}", source=source, oss=targets.get(source))
        for index, source in enumerate(plan.inputs)
    ]
    async with group:
        requests = {node.name: StageRequest(workdir=node.workdir, items=items) for node in plan.nodes}
        return await group.call_all("stage", requests, StageReply, timeout=None)


def compare_digests(items: dict[str, list[StagedItem]]) -> list[str]:
    """What lies on the nodes under one name but is not the same."""
    by_source: dict[str, dict[str, str]] = {}
    for node, staged in items.items():
        for item in staged:
            if not item.error:
                by_source.setdefault(item.source, {})[node] = item.digest
    return [
        f"{source} differs between nodes: " + ", ".join(f"{node} {digest[:12]}" for node, digest in digests.items())
        for source, digests in by_source.items()
        if len(set(digests.values())) > 1
    ]
