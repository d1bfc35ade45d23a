"""``restore``: a checkpoint comes back from the bucket to nodes; each node downloads for itself."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, Context

from swift_provider.config import Cluster, load_cluster, load_recipe
from swift_provider.config.checkpoints import KeepBest
from swift_provider.exceptions import RestoreFailed
from swift_provider.hooks.nodes import NodesHook
from swift_provider.hooks.oss import OSSHook
from swift_provider.operators.base import render_table
from swift_provider.operators.housekeeping import nodes_of
from swift_provider.planning.choosing import Stored, choose, existing
from swift_provider.planning.names import run_key
from swift_provider.planning.plan import NodePlan
from swift_provider.settings import config_dir
from trainer.protocol import FetchReply, FetchRequest, OssTarget

if TYPE_CHECKING:
    from swift_provider.hooks.group import NodeGroup


class RestoreOperator(BaseOperator):
    """Brings one checkpoint to nodes and returns ``{"checkpoint": url, "paths": {node: folder}}``.

    Nothing passes through Airflow. The folder appears at once and whole, each file proven by its CRC64; what was
    interrupted goes on in the next try, and a folder that is there already is compared and left alone. Where the
    target lies on the cluster's shared disk, the first node alone downloads.

    Args:
        checkpoint: ``oss://…/checkpoint-8``; or, with ``recipe``: ``latest``, ``best``, ``<run>/checkpoint-8``.
        recipe: whose checkpoint it is, unless ``checkpoint`` is a location.
        cluster: name of a cluster file; default: the recipe's cluster.
        nodes: names of nodes; default: all of the cluster.
        target: absolute path of the folder that the checkpoint's own is made in; default: ``restored/<run>`` below
            the cluster's ``shared_dir``, or below each node's work folder.
        oss_conn_id: Airflow connection of type ``oss``; default: the recipe's, else ``oss_default``.
    """

    template_fields: Sequence[str] = ("checkpoint", "recipe", "cluster", "nodes", "target", "oss_conn_id")

    def __init__(
        self,
        *,
        checkpoint: str,
        recipe: str | None = None,
        cluster: str | None = None,
        nodes: Any = None,
        target: str | None = None,
        oss_conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.checkpoint, self.recipe, self.cluster, self.nodes = checkpoint, recipe, cluster, nodes
        self.target, self.oss_conn_id = target, oss_conn_id

    def execute(self, context: Context) -> dict[str, Any]:
        """See the class.

        Raises:
            ValueError: a parameter names nothing, or too much.
            ConfigError: the recipe or the cluster file is wrong.
            RestoreFailed: a node could not bring it; names each node and why.
        """
        source, stored, cluster_name = self._source()
        cluster = load_cluster(cluster_name, config_dir())
        targets = self._targets(cluster, stored)
        group = NodesHook([node for node, _ in targets.values()], cluster.agent_python).group()
        requests = {name: FetchRequest(source, path) for name, (_, path) in targets.items()}
        replies, errors = asyncio.run(_fetch(group, requests))
        rows = [
            (name, reply.path, str(reply.files), f"{reply.size:,}")
            for name, reply in replies.items()
            if not reply.error
        ]
        self.log.info("%s\n%s", source.url, render_table(("node", "folder", "files", "bytes"), rows))
        failures = errors | {name: reply.error for name, reply in replies.items() if reply.error}
        if failures:
            lines = [f"{name}: {error}" for name, error in failures.items()]
            raise RestoreFailed(f"{source.url} is not on every node\n" + "\n".join(lines))
        return {"checkpoint": source.url, "paths": {name: reply.path for name, reply in replies.items()}}

    def _source(self) -> tuple[OssTarget, Stored, str]:
        """Where the checkpoint lies, what its manifest says, and the cluster that is meant."""
        from trainer.store import survey

        recipe = load_recipe(self.recipe, config_dir()) if self.recipe else None
        policy = recipe.checkpoints if recipe else None
        location = self.checkpoint if "://" in self.checkpoint else (policy.backup if policy else None)
        if location is None:
            raise ValueError(
                f"checkpoint: {self.checkpoint!r} is no oss:// location; give one, or a recipe with checkpoints.backup"
            )
        cluster = self.cluster or (recipe.cluster if recipe else None)
        if not cluster:
            raise ValueError("cluster: is missing; name a cluster file, or a recipe")
        conn_id = self.oss_conn_id or (policy.oss_conn_id if policy else "oss_default")
        place = OSSHook(conn_id).target(location.rstrip("/"))
        best: KeepBest | None = policy.keep_best if policy else None
        whose = recipe.name if recipe and "://" not in self.checkpoint else ""
        stored = choose(existing(survey(place), whose), self.checkpoint, best)
        return replace(place, prefix=stored.prefix), stored, cluster

    def _targets(self, cluster: Cluster, stored: Stored) -> dict[str, tuple[NodePlan, str]]:
        """For each node that downloads: the node, and the folder that appears there."""
        known = {node.name: node for node in nodes_of(cluster)}
        unknown = [name for name in self.nodes or [] if name not in known]
        if unknown:
            raise ValueError(f"nodes: {', '.join(unknown)}: not of cluster {cluster.name}; it has {', '.join(known)}")
        if self.target and not posixpath.isabs(self.target):
            raise ValueError(f"target: {self.target!r} is not an absolute path; write it from / on")
        chosen = [known[name] for name in self.nodes or known]
        folder = posixpath.join("restored", run_key(stored.manifest.dag_id, stored.manifest.run_id))
        found = {}
        for node in chosen:
            parent = self.target or posixpath.join(cluster.shared_dir or node.workdir, folder)
            found[node.name] = node, posixpath.normpath(posixpath.join(parent, stored.manifest.name))
        first = next(iter(found.values()))[1]
        if cluster.shared_dir and posixpath.commonpath([cluster.shared_dir, first]) == cluster.shared_dir:
            return {chosen[0].name: found[chosen[0].name]}
        return found


async def _fetch(group: NodeGroup, requests: dict[str, FetchRequest]) -> tuple[dict[str, FetchReply], dict[str, str]]:
    async with group:
        replies, errors = await group.call_each("fetch", requests, FetchReply, timeout=None)
    return replies, {name: str(error) for name, error in errors.items()}
