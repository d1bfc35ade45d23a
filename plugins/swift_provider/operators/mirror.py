"""Uploads while the training runs: one uploader beside each node's job. A courtesy: it never fails the training."""

from __future__ import annotations

import asyncio
import logging

from swift_provider.hooks.nodes import NodesHook
from swift_provider.hooks.oss import OSSHook
from swift_provider.planning.plan import LaunchPlan
from trainer.protocol import MirrorReply, MirrorRequest, OssTarget

log = logging.getLogger(__name__)


def mirror_while_training(plan: LaunchPlan, job_id: str) -> None:
    """Starts the uploaders of a gang that runs; to those that run already it hands the connection's present keys.

    What goes wrong is a warning: the backup task sends whatever is missing when the training is over.
    """
    if plan.backup_prefix is None or not plan.checkpoints.upload_while_training:
        return
    try:
        target = OSSHook(plan.checkpoints.oss_conn_id).target(plan.backup_prefix, plan.checkpoints.storage)
        notes = asyncio.run(_mirror(plan, job_id, target))
    except Exception as error:  # the training runs already; nothing here may end its task
        notes = [str(error)]
    for note in notes:
        log.warning("no upload while training: %s; the backup task sends everything", note)


async def _mirror(plan: LaunchPlan, job_id: str, target: OssTarget) -> list[str]:
    requests = {
        node.name: MirrorRequest(
            workdir=node.workdir,
            job_id=job_id,
            output_dir=node.output_dir,
            target=target,
            node=node.name,
            share=index if plan.shared else 0,
            shares=len(plan.nodes) if plan.shared else 1,
            partial=len(plan.nodes) > 1 and not plan.shared,
            bandwidth=plan.checkpoints.upload_bandwidth or 0,
        )
        for index, node in enumerate(plan.nodes)
    }
    group = NodesHook.for_plan(plan).group()
    async with group:
        replies, errors = await group.call_each("mirror", requests, MirrorReply)
    return [f"{name}: {reply.error}" for name, reply in replies.items() if reply.error] + [
        f"{name}: {error}" for name, error in errors.items()
    ]
