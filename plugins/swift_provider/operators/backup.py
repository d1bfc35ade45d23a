"""``backup``: every whole checkpoint of the run is in the bucket, verified, with its manifest written last."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context
from airflow.sdk.exceptions import AirflowSkipException

from swift_provider.exceptions import BackupFailed
from swift_provider.hooks.nodes import NodesHook
from swift_provider.hooks.oss import OSSHook
from swift_provider.listener import XCOM_GANG
from swift_provider.operators.base import PlanConsumer
from swift_provider.operators.checkpoints import RunCheckpoint, gather_checkpoints, share_out
from swift_provider.operators.manifests import Origin, claim, manifest_of, origin_of
from swift_provider.planning.plan import LaunchPlan
from trainer.protocol import BackupReply, BackupRequest, Manifest, OssTarget, StoredFile, Verdict

if TYPE_CHECKING:
    from swift_provider.hooks.group import NodeGroup


#: A node's upload of one checkpoint may take this long (seconds): 1 TB at 1 Gbit/s is 2.2 hours.
UPLOAD_TIMEOUT_S = 12 * 3600.0


class BackupOperator(PlanConsumer):
    """Sends what the nodes hold to ``oss://bucket/prefix/<dag>/<run>/checkpoint-N/`` and returns the manifests.

    The bytes go from the nodes to the bucket, each file once, and each object's CRC64 is compared with the server's.
    Only when all objects of a checkpoint are proven is its ``manifest.json`` written. What is there already is not
    sent again, so that a retry goes on where the last try ended.

    Args:
        plan: see :class:`~swift_provider.operators.base.PlanConsumer`.
        facts: what ``PreflightOperator`` returned; the versions go into the manifests.
        follows: id of the train task; where that has started no gang, there is nothing to mirror.
        staged_by: id of the stage task, whose digests of models and data go into the manifests.
    """

    template_fields: Sequence[str] = ("plan", "facts")

    def __init__(
        self, *, facts: Any = None, follows: str | None = None, staged_by: str = "stage", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.facts, self.follows, self.staged_by = facts, follows, staged_by

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """See the class.

        Raises:
            BackupFailed: a checkpoint could not be proven to be in the bucket; names it and the file.
        """
        if self.follows and context["ti"].xcom_pull(task_ids=self.follows, key=XCOM_GANG) is None:
            raise AirflowSkipException(f"{self.follows} has started nothing that could be mirrored")
        plan = self.launch_plan
        if plan.backup_prefix is None:
            self.log.info("the recipe names no backup (checkpoints.backup); nothing is mirrored")
            return []
        target = OSSHook(plan.checkpoints.oss_conn_id).target(plan.backup_prefix, plan.checkpoints.storage)
        group = NodesHook.for_plan(plan).group()
        origin = origin_of(context, self.facts, self.staged_by)
        manifests, failures = asyncio.run(self._mirror(plan, group, target, origin))
        if failures:
            raise BackupFailed("not in the bucket\n" + "\n".join(failures))
        return [
            {
                "name": manifest.name,
                "step": manifest.step,
                "url": f"{target.url}/{manifest.name}",
                "bytes": manifest.total_bytes,
                "files": len(manifest.files),
                "metrics": manifest.metrics,
            }
            for manifest in manifests
        ]

    async def _mirror(
        self, plan: LaunchPlan, group: NodeGroup, target: OssTarget, origin: Origin
    ) -> tuple[list[Manifest], list[str]]:
        manifests: list[Manifest] = []
        failures: list[str] = []
        async with group:
            checkpoints = await gather_checkpoints(plan, group)
            unwritable = any(item.whole for item in checkpoints) and claim(plan, target, origin)
            if unwritable:
                return [], [unwritable]
            for checkpoint in checkpoints:
                if not checkpoint.whole:
                    judgement = checkpoint.judgement
                    self.log.warning("%s is %s: %s", checkpoint.name, judgement.verdict, judgement.reason)
                    continue
                place, conflict = self._place(checkpoint, target)
                if conflict:
                    failures.append(conflict)
                    continue
                files, errors = await self._send(plan, group, checkpoint, place)
                if errors:
                    failures += [f"{checkpoint.name}: {name}: {error}" for name, error in errors.items()]
                    continue
                manifest = manifest_of(plan, checkpoint, files, origin)
                failure = self._write_manifest(target, manifest)
                if failure:
                    failures.append(failure)
                else:
                    manifests.append(manifest)
        failures += self._point_at_newest(target, manifests)
        return manifests, failures

    def _place(self, checkpoint: RunCheckpoint, target: OssTarget) -> tuple[OssTarget, str]:
        """Where a checkpoint goes. What a manifest there speaks of is never overwritten, only completed."""
        from trainer.store import StoreError, read_manifest

        place = replace(target, prefix=target.key(checkpoint.name))
        try:
            known = read_manifest(place)
        except StoreError as error:
            return place, f"{checkpoint.name}: {error}"
        if known is None:
            return place, ""
        if {file.path: file.size for file in known.files} != checkpoint.sizes:
            return place, f"{checkpoint.name}: {place.url} already holds another {checkpoint.name}; nothing was sent"
        return replace(place, options=replace(place.options, forbid_overwrite=True)), ""

    def _point_at_newest(self, target: OssTarget, manifests: list[Manifest]) -> list[str]:
        from trainer.store import StoreError, write_latest

        resumable = [manifest for manifest in manifests if manifest.verdict == Verdict.COMPLETE] or manifests
        try:
            for manifest in sorted(resumable, key=lambda item: item.step)[-1:]:
                write_latest(target, manifest)
        except StoreError as error:
            return [f"latest.json: {error}"]
        return []

    async def _send(
        self, plan: LaunchPlan, group: NodeGroup, checkpoint: RunCheckpoint, place: OssTarget
    ) -> tuple[list[StoredFile], dict[str, str]]:
        nodes = {node.name: node for node in plan.nodes}
        requests = {
            name: BackupRequest(
                output_dir=nodes[name].output_dir,
                checkpoint=checkpoint.name,
                files=paths,
                target=place,
                node=name,
                state_dir=posixpath.join(nodes[name].workdir, "uploads"),
                bandwidth=plan.checkpoints.upload_bandwidth or 0,
            )
            for name, paths in share_out(checkpoint).items()
        }
        replies, broken = await group.call_each("backup", requests, BackupReply, timeout=UPLOAD_TIMEOUT_S)
        errors = {name: str(error) for name, error in broken.items()}
        for name, reply in replies.items():
            errors |= {f"{name}: {path}": error for path, error in reply.errors.items()}
        files = [file for reply in replies.values() for file in reply.files]
        sent = sum(reply.sent for reply in replies.values())
        copied = sum(reply.copied for reply in replies.values())
        self.log.info(
            "%s: %d of %d files proven in %s, %s bytes, %s sent now, %s copied from earlier checkpoints in the bucket",
            *(checkpoint.name, len(files), len(checkpoint.sizes), place.url),
            *(f"{size:,}" for size in (checkpoint.size, sent, copied)),
        )
        missing = set(checkpoint.sizes) - {file.path for file in files}
        if missing and not errors:
            errors["files"] = f"no answer about {', '.join(sorted(missing)[:5])}"
        return files, errors

    def _write_manifest(self, target: OssTarget, manifest: Manifest) -> str | None:
        from trainer.store import StoreError, write_manifest

        try:
            write_manifest(replace(target, prefix=target.key(manifest.name)), manifest)
        except StoreError as error:
            return f"{manifest.name}: manifest: {error}"
        return None
