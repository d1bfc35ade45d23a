"""``housekeeping``: the third line of a cancel, and the finder of everything that has no owner any more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowException

from swift_provider.config import Cluster, ConfigError, list_clusters, load_cluster
from swift_provider.exceptions import TrainingError
from swift_provider.hooks.cancel import cancel_once
from swift_provider.hooks.nodes import NodesHook
from swift_provider.operators.base import render_table
from swift_provider.planning.housekeeping import FoundJob, Standing, is_living, stand, task_key
from swift_provider.planning.plan import NodePlan
from swift_provider.settings import config_dir, origin
from trainer.protocol import JobsReply, JobsRequest, JobState, Owner

if TYPE_CHECKING:
    from swift_provider.hooks.group import NodeGroup


#: A cancel by housekeeping is meant for every try of the task.
EVERY_TRY = 2**31 - 1


class HousekeepingOperator(BaseOperator):
    """Compares the jobs on all nodes with the runs in Airflow and returns what has no owner.

    Args:
        clusters: names of cluster files; default: all of them.
        policy: ``report`` tells, ``stop`` also ends the jobs without owner. Jobs of another Airflow are only told.
    """

    template_fields: Sequence[str] = ("clusters", "policy")

    def __init__(self, *, clusters: Any = None, policy: str = "report", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.clusters, self.policy = clusters, policy

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """See the class.

        Raises:
            ValueError: ``policy`` is neither ``report`` nor ``stop``.
        """
        if self.policy not in ("report", "stop"):
            raise ValueError(f"policy must be report or stop, is {self.policy!r}")
        found: list[FoundJob] = []
        for name in self.clusters or list_clusters(config_dir()):
            try:
                cluster = load_cluster(name, config_dir())
                found += self._look(cluster, context)
            except (ConfigError, AirflowException, ValueError) as error:  # also a connection that does not exist
                self.log.warning("cluster %s is left out: %s", name, error)
        rows = [
            (job.standing, job.cluster, job.node, job.state.job_id, job.state.phase, job.state.owner.run_id, job.reason)
            for job in found
        ]
        self.log.info("%s", render_table(("", "cluster", "node", "job", "phase", "run", "why"), rows))
        return [
            {"cluster": job.cluster, "node": job.node, "job_id": job.state.job_id, "reason": job.reason}
            for job in found
            if job.standing is Standing.ORPHAN
        ]

    def _look(self, cluster: Cluster, context: Context) -> list[FoundJob]:
        hook = NodesHook(nodes_of(cluster), cluster.agent_python)
        replies, errors = asyncio.run(_list_jobs(hook.group()))
        for error in errors.values():
            self.log.warning("cluster %s: %s", cluster.name, error)
        living = {name: [job for job in reply.jobs if is_living(job)] for name, reply in replies.items()}
        states = self._task_states(context, [job for jobs in living.values() for job in jobs])
        found = [stand(cluster.name, name, job, states, origin()) for name, jobs in living.items() for job in jobs]
        if self.policy == "stop":
            orphans = [job for job in found if job.standing is Standing.ORPHAN]
            asyncio.run(self._stop(hook.group(), orphans))
        return found

    def _task_states(self, context: Context, jobs: Iterable[JobState]) -> dict[tuple[str, str, str, int], str | None]:
        """The states of the jobs' task instances, as far as Airflow knows them."""
        ti: Any = context["ti"]
        states: dict[tuple[str, str, str, int], str | None] = {}
        for owner in {job.owner for job in jobs if job.owner.origin == origin()}:
            answer: Mapping[str, Any] = ti.get_task_states(
                dag_id=owner.dag_id,
                run_ids=[owner.run_id],
                task_ids=[owner.task_id],
                map_index=owner.map_index if owner.map_index >= 0 else None,
            )
            by_task = answer.get(owner.run_id)
            if by_task is not None and owner.task_id in by_task:
                states[task_key(owner)] = by_task[owner.task_id]
        return states

    async def _stop(self, group: NodeGroup, orphans: list[FoundJob]) -> None:
        async with group:
            for job in orphans:
                owner: Owner = replace(job.state.owner, try_number=EVERY_TRY)
                errors = await cancel_once(group, owner, f"no owner: {job.reason}", {job.node})
                for error in errors.values():
                    self.log.warning("%s: job %s was not stopped: %s", job.node, job.state.job_id, error)


async def _list_jobs(group: NodeGroup) -> tuple[dict[str, JobsReply], dict[str, TrainingError]]:
    async with group:
        return await list_jobs(group)


async def list_jobs(group: NodeGroup) -> tuple[dict[str, JobsReply], dict[str, TrainingError]]:
    """Every job that each node knows, and the nodes that did not answer."""
    requests = {name: JobsRequest(workdir=session.workdir) for name, session in group.sessions.items()}
    return await group.call_each("jobs", requests, JobsReply)


def nodes_of(cluster: Cluster) -> list[NodePlan]:
    """All nodes of a cluster, for work that belongs to no run."""
    return [
        NodePlan(
            name=node.name,
            ssh_conn_id=node.ssh_conn_id,
            address=node.address or "",
            rank=rank,
            slots=node.slots,
            workdir=cluster.workdir_of(node),
            output_dir="",
        )
        for rank, node in enumerate(cluster.nodes)
    ]
