"""``clean_up``: what runs left behind for good, in the buckets and on the nodes, is told, or deleted by policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowException, AirflowSkipException

from swift_provider.config import ConfigError, list_clusters, list_recipes, load_cluster, load_recipe
from swift_provider.hooks.nodes import NodesHook
from swift_provider.hooks.oss import OSSHook
from swift_provider.operators.base import render_table
from swift_provider.operators.housekeeping import list_jobs, nodes_of
from swift_provider.operators.recipe_runs import states_of
from swift_provider.planning.cleanup import judge
from swift_provider.planning.housekeeping import is_living
from swift_provider.planning.retention import RunId
from swift_provider.settings import config_dir
from trainer.protocol import SweepReply, SweepRequest

if TYPE_CHECKING:
    from swift_provider.hooks.group import NodeGroup

DAY_S = 86400.0
SWEEP_TIMEOUT_S = 3600.0  # for one node to delete what is old


@dataclass(frozen=True)
class Limits:
    """How old is old, in seconds, and how large the downloads of a node may be, in bytes; ``None``: no limit."""

    grace_s: float
    jobs_age_s: float | None
    cache_age_s: float | None
    cache_bytes: int | None


class CleanUpOperator(BaseOperator):
    """Finds the remains of uploads in the buckets of all recipes, and old jobs and downloads on the nodes.

    What a run under way uploads, what a living job uses, and what is young is never touched. A bucket or a node that
    cannot be reached is told, and hides nothing of the others.

    Args:
        policy: ``report`` tells, ``delete`` also deletes.
        grace_hours: nothing of an upload must have come for so long.
        jobs_days: folders of jobs that ended so long ago go; 0: none do.
        cache_days: downloads that no run has wanted for so long go; 0: none do.
        cache_gib: what a node's downloads may take together; 0: any size.
        hour: a scheduled run does this only in the first half of this hour (UTC); a manual one always.
    """

    template_fields: Sequence[str] = ("policy", "grace_hours", "jobs_days", "cache_days", "cache_gib")

    def __init__(
        self,
        *,
        policy: str = "report",
        grace_hours: Any = 24,
        jobs_days: Any = 30,
        cache_days: Any = 30,
        cache_gib: Any = 0,
        hour: int = 4,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.policy, self.grace_hours, self.jobs_days = policy, grace_hours, jobs_days
        self.cache_days, self.cache_gib, self.hour = cache_days, cache_gib, hour

    def execute(self, context: Context) -> dict[str, list[dict[str, Any]]]:
        """See the class.

        Raises:
            ValueError: ``policy`` is neither ``report`` nor ``delete``, or a limit is no number.
            CleanUpFailed: something could not be deleted; everything else was.
        """
        if self.policy not in ("report", "delete"):
            raise ValueError(f"policy must be report or delete, is {self.policy!r}")
        self._skip_unless_due(context)
        limits = self._limits()
        failures: list[str] = []
        nodes, on_nodes = self._clean_nodes(limits, failures)
        buckets = self._clean_buckets(context.get("ti"), on_nodes, limits, failures)
        word = "deleted" if self.policy == "delete" else "would go"
        rows = [
            (row["where"], row["what"], f"{row['bytes']:,}", word if row["delete"] else "kept", row["reason"])
            for row in [*buckets, *nodes]
        ]
        self.log.info("%s", render_table(("where", "what", "bytes", "decision", "reason"), rows))
        if failures:
            from swift_provider.exceptions import CleanUpFailed

            raise CleanUpFailed("could not be deleted\n" + "\n".join(failures))
        return {"buckets": buckets, "nodes": nodes}

    def _skip_unless_due(self, context: Context) -> None:
        run: Any = context.get("dag_run")
        when = getattr(run, "run_after", None)
        run_type = getattr(getattr(run, "run_type", None), "value", None)
        if run_type == "scheduled" and when is not None and (when.hour != self.hour or when.minute >= 30):
            raise AirflowSkipException(f"scheduled runs clean up once a day, at {self.hour}:00 UTC")

    def _limits(self) -> Limits:
        given = {name: getattr(self, name) for name in ("grace_hours", "jobs_days", "cache_days", "cache_gib")}
        values = {}
        for name, value in given.items():
            values[name] = float(value)
            if not values[name] >= 0:
                raise ValueError(f"{name} must be 0 or more, is {value!r}")
        return Limits(
            grace_s=values["grace_hours"] * 3600,
            jobs_age_s=values["jobs_days"] * DAY_S or None,
            cache_age_s=values["cache_days"] * DAY_S or None,
            cache_bytes=int(values["cache_gib"] * 2**30) or None,
        )

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _clean_nodes(self, limits: Limits, failures: list[str]) -> tuple[list[dict[str, Any]], set[RunId]]:
        rows: list[dict[str, Any]] = []
        running: set[RunId] = set()
        for name in list_clusters(config_dir()):
            try:
                cluster = load_cluster(name, config_dir())
                group = NodesHook(nodes_of(cluster), cluster.agent_python).group()
            except (ConfigError, AirflowException, ValueError) as error:  # also a connection that does not exist
                self.log.warning("cluster %s is left out: %s", name, error)
                continue
            found, jobs, problems = asyncio.run(self._sweep(group, limits))
            running |= jobs
            for problem in problems:
                self.log.warning("cluster %s: %s", name, problem)
            for node, reply in found.items():
                for item in reply.found:
                    where = f"{name}/{node}"
                    row = {"where": where, "what": item.path, "bytes": item.size, "reason": item.reason}
                    rows.append({**row, "delete": item.error is None})
                    if item.error:
                        failures.append(f"{where}: {item.path}: {item.error}")
        return rows, running

    async def _sweep(self, group: NodeGroup, limits: Limits) -> tuple[dict[str, SweepReply], set[RunId], list[str]]:
        async with group:
            jobs, unreached = await list_jobs(group)
            running = {
                (job.owner.dag_id, job.owner.run_id) for reply in jobs.values() for job in reply.jobs if is_living(job)
            }
            requests = {
                name: SweepRequest(
                    workdir=group.sessions[name].workdir,
                    jobs_age_s=limits.jobs_age_s,
                    cache_age_s=limits.cache_age_s,
                    cache_bytes=limits.cache_bytes,
                    delete=self.policy == "delete",
                )
                for name in jobs
            }
            replies, errors = await group.call_each("sweep", requests, SweepReply, timeout=SWEEP_TIMEOUT_S)
        return replies, running, [str(error) for error in (*unreached.values(), *errors.values())]

    # -- buckets ----------------------------------------------------------------------------------------------------

    def _clean_buckets(
        self, ti: Any, on_nodes: set[RunId], limits: Limits, failures: list[str]
    ) -> list[dict[str, Any]]:
        from trainer.store import StoreError, find_leftovers, remove

        rows: list[dict[str, Any]] = []
        for location, conn_id in sorted(self._places()):
            try:
                target = OSSHook(conn_id).target(location)
                leftovers = find_leftovers(target)
            except (AirflowException, ValueError, StoreError) as error:
                self.log.warning("%s is left out: %s", location, error)
                continue
            states = states_of(ti, {(item.run.get("dag_id", ""), item.run.get("run_id", "")) for item in leftovers})
            for leftover in leftovers:
                fate = judge(leftover, states, on_nodes, time.time(), limits.grace_s)
                place = f"oss://{target.bucket}/{leftover.prefix}"
                what = f"{place} ({len(leftover.keys)} objects, {len(leftover.uploads)} unfinished uploads)"
                row = {"where": "bucket", "what": what, "bytes": leftover.size, "reason": fate.reason}
                rows.append({**row, "delete": fate.delete})
                if fate.delete and self.policy == "delete":
                    try:
                        remove(target, leftover)
                    except StoreError as error:
                        failures.append(f"{place}: {error}")
        return rows

    def _places(self) -> set[tuple[str, str]]:
        """Where the recipes' checkpoints go, and by which connection."""
        found = set()
        for name in list_recipes(config_dir()):
            try:
                policy = load_recipe(name, config_dir()).checkpoints
            except ConfigError as error:
                self.log.warning("recipe %s is left out: %s", name, error)
                continue
            if policy.backup is not None:
                found.add((policy.backup, policy.oss_conn_id))
        return found
