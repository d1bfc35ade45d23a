"""What the train operator does with a gang before it defers: look, start, wait for an end. No Airflow context here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swift_provider.exceptions import (
    DeadlineExceeded,
    GangStartFailed,
    NodeBusy,
    NodeLost,
    TrainingError,
    TrainingStopped,
)
from swift_provider.hooks.commit import commit_by_file
from swift_provider.operators.checkpoints import gather_checkpoints
from swift_provider.planning.gang import START_FAILED, GangHandle, describe_end
from swift_provider.planning.launch import Resume, job_spec
from swift_provider.planning.plan import LaunchPlan, NodePlan
from trainer.protocol import (
    CommitReply,
    CommitRequest,
    JobState,
    Owner,
    Phase,
    StartReply,
    StartRequest,
    StartResult,
    StatusReply,
    StatusRequest,
    StopReason,
    StopReply,
    StopRequest,
    Verdict,
)

if TYPE_CHECKING:
    from swift_provider.hooks.group import NodeGroup


log = logging.getLogger(__name__)

#: How long a prepared node waits for the others before it releases itself (seconds).
PREPARED_FOR_S = 180.0
#: Beyond the grace between TERM and KILL: the sweep, the last state, and the way to us (seconds).
STOP_MARGIN_S = 30.0
POLL_S = 1.0


class Gang:
    """The jobs of one run, over an open :class:`NodeGroup`.

    Args:
        plan: of the run.
        group: its nodes.
        owner: who the leases belong to.
        staged: for each node, location → path.
    """

    def __init__(
        self, plan: LaunchPlan, group: NodeGroup, owner: Owner, staged: Mapping[str, Mapping[str, str]]
    ) -> None:
        self.plan, self.group, self.owner, self.staged = plan, group, owner, staged

    async def states(self, job_id: str) -> dict[str, JobState]:
        """The proven state of the job on every node.

        Raises:
            TrainingError: a node did not answer; nothing can be concluded.
        """
        requests = {node.name: StatusRequest(workdir=node.workdir, job_id=job_id) for node in self.plan.nodes}
        replies = await self.group.call_all("status", requests, StatusReply)
        return {name: reply.state for name, reply in replies.items()}

    async def start(self, handle: GangHandle, resume: Resume | None) -> dict[str, JobState]:
        """Starts the job on every node, or attaches to it where it is there already; in two phases.

        First every node prepares: lease, files, port. Only when all of them are prepared does any training process
        start. If one node cannot prepare, the others are released.

        Raises:
            NodeBusy: a node's lease is with another job.
            GangStartFailed: a node could not prepare or start its job.
            NodeLost: a node's supervisor died between the two phases.
            DeadlineExceeded: ``max_runtime`` was over before the training began.
            TrainingStopped: a user has cancelled this try of the task, or stopped its job on a node.
            TrainingError: a node did not answer.
        """
        requests = {
            node.name: StartRequest(
                workdir=node.workdir,
                hold_s=PREPARED_FOR_S,
                spec=job_spec(
                    self.plan,
                    node,
                    job_id=handle.job_id,
                    owner=self.owner,
                    staged=self.staged.get(node.name, {}),
                    resume=resume,
                    deadline=handle.deadline,
                ),
            )
            for node in self.plan.nodes
        }
        replies, errors = await self.group.call_each("start", requests, StartReply)
        older = self._older_generations(replies, handle)
        if older:
            await self._fence(older)
            replies, errors = await self.group.call_each("start", requests, StartReply)
        failure = _start_failure(replies, errors)
        if failure is not None:
            started = [name for name, reply in replies.items() if reply.result == StartResult.STARTED]
            await self.stop(handle.job_id, START_FAILED, started + list(errors))
            raise failure
        for name, reply in replies.items():
            log.info(
                "%s: %s job %s", name, "prepared" if reply.result == StartResult.STARTED else "found", handle.job_id
            )
        states = {name: reply.state for name, reply in replies.items() if reply.state is not None}
        return states | await self._commit(handle.job_id, states)

    async def _commit(self, job_id: str, states: Mapping[str, JobState]) -> dict[str, JobState]:
        """Says go to the nodes that are prepared; what already trains, or has ended its part well, is left alone."""
        prepared = {name for name, state in states.items() if state.phase == Phase.PREPARING}
        over = [describe_end(name, state) for name, state in states.items() if state.phase in Phase.ENDED]
        if prepared and over:
            await self.stop(job_id, START_FAILED)
            raise GangStartFailed("a part had ended before all were prepared: " + "; ".join(over))
        replies, errors = await self._say_go(job_id, [node for node in self.plan.nodes if node.name in prepared])
        refused = [f"{name}: {reply.error}" for name, reply in replies.items() if reply.error]
        lost = [str(error) for error in errors.values()]
        if refused or lost:
            await self.stop(job_id, START_FAILED)
            if not refused:  # nothing is known against the gang but that a node was out of reach
                raise type(next(iter(errors.values())))("\n".join(lost))
            raise _commit_failure([reply.state for reply in replies.values()])("\n".join(refused + lost))
        if prepared:
            log.info("every node is prepared: job %s starts", job_id)
        return {name: reply.state for name, reply in replies.items()}

    async def _say_go(
        self, job_id: str, nodes: list[NodePlan]
    ) -> tuple[dict[str, CommitReply], dict[str, TrainingError]]:
        sessions = self.group.sessions
        quick = await asyncio.gather(*(commit_by_file(sessions[node.name], job_id) for node in nodes))
        replies = {node.name: reply for node, reply in zip(nodes, quick, strict=True) if reply is not None}
        requests = {
            node.name: CommitRequest(workdir=node.workdir, job_id=job_id) for node in nodes if node.name not in replies
        }
        more, errors = await self.group.call_each("commit", requests, CommitReply)
        return replies | more, errors

    def _older_generations(self, replies: Mapping[str, StartReply], handle: GangHandle) -> set[str]:
        """Jobs of this same run that still hold a node: a newer generation ends them first."""
        return {
            reply.holder.job_id
            for reply in replies.values()
            if reply.result == StartResult.BUSY
            and reply.holder is not None
            and reply.holder.owner.same_task(self.owner)
            and reply.holder.job_id != handle.job_id
        }

    async def _fence(self, job_ids: set[str]) -> None:
        for old in sorted(job_ids):
            log.info("ending job %s of an earlier generation", old)
            await self.stop(old, StopReason.SUPERSEDED)
            await self.wait_until_over(old)

    async def stop(self, job_id: str, reason: str, names: list[str] | None = None) -> dict[str, TrainingError]:
        """Asks for the end of the job on the named nodes (default: all); returns the errors of those not reached."""
        workdirs = {node.name: node.workdir for node in self.plan.nodes}
        requests = {
            name: StopRequest(workdir=workdirs[name], job_id=job_id, reason=reason, grace_s=self.plan.grace)
            for name in (workdirs if names is None else names)
        }
        _, errors = await self.group.call_each("stop", requests, StopReply)
        return errors

    async def wait_until_over(self, job_id: str) -> dict[str, JobState]:
        """Waits until no process of the job is left anywhere.

        Raises:
            GangStartFailed: something is still there after the grace and a margin.
        """
        limit = time.monotonic() + self.plan.grace + STOP_MARGIN_S
        while True:
            states = await self.states(job_id)
            alive = {name: state for name, state in states.items() if state.phase in Phase.ALIVE}
            if not alive:
                return states
            if time.monotonic() > limit:
                names = ", ".join(alive)
                raise GangStartFailed(f"job {job_id} does not end on {names}; look at its processes there")
            await asyncio.sleep(POLL_S)

    async def newest_complete_checkpoint(self) -> Resume | None:
        """The newest checkpoint of this run from which its gang can go on, if there is one."""
        for checkpoint in reversed(await gather_checkpoints(self.plan, self.group)):
            if checkpoint.judgement.verdict == Verdict.COMPLETE:
                # DeepSpeed writes `latest` on one node, and without a shared disk the others cannot resume without it.
                files = {
                    f"{checkpoint.name}/{name}": text for name, text in checkpoint.texts.items() if name == "latest"
                }
                return Resume(checkpoint.name, checkpoint.step, files)
        return None


def _start_failure(replies: Mapping[str, StartReply], errors: Mapping[str, TrainingError]) -> TrainingError | None:
    busy = [
        f"{name}: busy with {_describe_holder(reply)}"
        for name, reply in replies.items()
        if reply.result == StartResult.BUSY
    ]
    failed = [f"{name}: {reply.error}" for name, reply in replies.items() if reply.result == StartResult.FAILED]
    cancelled = [name for name, reply in replies.items() if reply.result == StartResult.CANCELLED]
    if cancelled:
        return TrainingStopped(f"a user has cancelled this try: said {', '.join(cancelled)}")
    if failed:
        return GangStartFailed("\n".join(failed + busy + [str(error) for error in errors.values()]))
    if errors:
        first = next(iter(errors.values()))
        return type(first)("\n".join([str(error) for error in errors.values()] + busy))
    return NodeBusy("\n".join(busy)) if busy else None


def _commit_failure(states: list[JobState]) -> type[TrainingError]:
    reasons = {state.stop_reason for state in states}
    if StopReason.DEADLINE in reasons:
        return DeadlineExceeded
    if StopReason.REQUESTED in reasons:  # by hand on a node, between the two phases
        return TrainingStopped
    return NodeLost if any(state.phase == Phase.LOST for state in states) else GangStartFailed


def _describe_holder(reply: StartReply) -> str:
    holder = reply.holder
    if holder is None:
        return "another job"
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder.since))
    owner = holder.owner
    return f"dag {owner.dag_id}, run {owner.run_id} of {owner.origin or 'an unknown Airflow'} since {since}"


def result_of(handle: GangHandle, plan: LaunchPlan, states: Mapping[str, JobState]) -> dict[str, Any]:
    """What the train task returns: where the checkpoints are and how far the training came."""
    progress = max((s.progress for s in states.values() if s.progress), key=lambda p: p.step, default=None)
    names = {name for state in states.values() for name in state.checkpoints}
    given = any(plan.args.get(name) for name in ("max_steps", "train_iters"))
    return {
        "job_id": handle.job_id,
        "generation": handle.generation,
        "output_dir": plan.nodes[0].output_dir,
        "step": progress.step if progress else None,
        "loss": progress.loss if progress else None,
        # What follows from the data holds for the next run too; what this run was given may not.
        "steps_of_data": None if given or progress is None else progress.max_steps,
        "seconds_per_step": progress.seconds_per_step if progress else None,
        "recipe": plan.recipe,
        "world_size": plan.world_size,
        "global_batch": plan.global_batch,
        "checkpoints": sorted(names, key=lambda name: int(name.rpartition("-")[2])),
        "ends": [describe_end(name, state) for name, state in states.items()],
    }
