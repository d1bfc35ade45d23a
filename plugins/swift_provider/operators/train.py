"""``train``: one gang per run, started once, followed without holding a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from airflow.sdk import Context

from swift_provider.exceptions import (
    DeadlineExceeded,
    GangStartFailed,
    NodeLost,
    NoProgress,
    TrainingError,
    TrainingFailed,
    TrainingRefused,
    TrainingStopped,
)
from swift_provider.hooks.nodes import NodesHook
from swift_provider.listener import XCOM_GANG
from swift_provider.operators.base import PlanConsumer
from swift_provider.operators.gang import Gang, result_of
from swift_provider.operators.mirror import mirror_while_training
from swift_provider.planning.diagnosis import diagnose
from swift_provider.planning.gang import (
    START_FAILED,
    GangHandle,
    Step,
    cancelled_earlier,
    cancelled_try,
    describe_end,
    ended_well,
    first_failure,
    is_root,
    next_step,
)
from swift_provider.planning.launch import Resume
from swift_provider.planning.names import digest, job_id
from swift_provider.planning.plan import LaunchPlan
from swift_provider.settings import origin
from swift_provider.triggers.gang import GangTrigger
from trainer import protocol
from trainer.protocol import JobState, Owner, Phase, StopReason

#: Generations in a row that may end without a new complete checkpoint (NVRx stops after as many).
MAX_IDLE_GENERATIONS = 3
#: Log lines of the first cause's node that its exception carries.
SHOWN_LINES = 30
#: Key of the gang's handle in Airflow's task state, which survives retries and clears.
STATE_KEY = "gang"


class TrainOperator(PlanConsumer):
    """Starts the gang of a run, or finds it again, defers, and ends with a verdict.

    A retry, a cleared task and the successor of a dead worker all arrive at the same job id: they attach to a
    training that runs, return the result of one that has ended well, and otherwise start the next generation from
    the newest complete checkpoint. The training runs detached on the nodes; no Airflow component needs to live
    while it does. Marking the task failed or successful, or clearing it, ends the training on every node.

    Args:
        plan: see :class:`~swift_provider.operators.base.PlanConsumer`.
        staged: what ``StageOperator`` returned.
        poll_interval: seconds between two looks at the nodes.
        unreachable_grace: seconds that a node may be out of reach, while the run does not step, before it is lost.
    """

    template_fields: Sequence[str] = ("plan", "staged")

    def __init__(
        self, *, staged: Any = None, poll_interval: float = 2.0, unreachable_grace: float = 600.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.staged = staged
        self.poll_interval, self.unreachable_grace = poll_interval, unreachable_grace

    def execute(self, context: Context) -> Any:
        """Starts or finds the gang, then defers.

        Raises:
            NodeBusy: a node trains something else.
            GangStartFailed: a node could not start its job.
            DeadlineExceeded: ``max_runtime`` was over before this try had started its gang.
            TrainingError: a node did not answer.
        """
        plan = self.launch_plan
        handle = self._load_handle(context, plan)
        if handle.deadline is not None and time.time() > handle.deadline:
            raise DeadlineExceeded(f"max_runtime of {plan.max_runtime:g} s is over")
        try:
            handle, result = asyncio.run(self._attach_or_start(context, plan, handle))
        except GangStartFailed as error:
            if handle.deadline is None or time.time() <= handle.deadline:
                raise
            raise DeadlineExceeded(f"max_runtime of {plan.max_runtime:g} s ended before the start: {error}") from error
        if result is not None:
            return result
        mirror_while_training(plan, handle.job_id)
        self.defer(
            trigger=GangTrigger(
                nodes=[node.model_dump(mode="json") for node in plan.nodes],
                python=plan.agent_python,
                job_id=handle.job_id,
                owner=asdict(self._owner(context)),
                deadline=handle.deadline,
                poll_interval=self.poll_interval,
                unreachable_grace=self.unreachable_grace,
            ),
            method_name="execute_complete",
            timeout=None,
        )
        raise AssertionError("defer() does not return")

    async def _attach_or_start(
        self, context: Context, plan: LaunchPlan, handle: GangHandle
    ) -> tuple[GangHandle, dict[str, Any] | None]:
        """The handle of a gang that runs now; or, with it, the result of one that has already ended well."""
        group = self._group(plan)
        async with group:
            owner = self._owner(context)
            nodes = [node.model_dump(mode="json") for node in plan.nodes]
            # Whoever cancels this task from now on, also while it starts, finds here what it takes to do so.
            context["ti"].xcom_push(XCOM_GANG, {"nodes": nodes, "python": plan.agent_python, "owner": asdict(owner)})
            gang = Gang(plan, group, owner, self.staged or {})
            states = await gang.states(handle.job_id)
            step = next_step(states)
            if step is Step.JOIN:
                resume = await gang.newest_complete_checkpoint() if handle.resumed_step else None
                if await self._join(gang, handle, resume):
                    return handle, None
                step = Step.WAIT
            if step is Step.WAIT:
                self.log.info("job %s is being stopped; waiting until it is gone", handle.job_id)
                await gang.stop(handle.job_id, StopReason.SUPERSEDED)
                states, step = await gang.wait_until_over(handle.job_id), Step.NEXT
            if step is Step.FINISHED:
                self.log.info("job %s has already ended well; nothing is started", handle.job_id)
                self._store(context, handle, finished=True)
                return handle, result_of(handle, plan, states)
            handle, resume = await self._next_generation(context, plan, handle, gang, states)
            await gang.start(handle, resume)
        return handle, None

    async def _join(self, gang: Gang, handle: GangHandle, resume: Resume | None) -> bool:
        """Starts or finds the gang; ``False`` when it is the one that a user has just cleared away.

        Airflow starts a cleared task's next try while the cancel is still on its way to the nodes.
        """
        try:
            await gang.start(handle, resume)
        except GangStartFailed:
            if not cancelled_earlier(await gang.states(handle.job_id), gang.owner.try_number):
                raise
            return False
        return True

    async def _next_generation(
        self, context: Context, plan: LaunchPlan, handle: GangHandle, gang: Gang, states: Mapping[str, JobState]
    ) -> tuple[GangHandle, Resume | None]:
        for name, state in states.items():
            if state.phase != Phase.ABSENT:
                self.log.info("generation %d: %s", handle.generation, describe_end(name, state))
        await gang.stop(handle.job_id, StopReason.SUPERSEDED)
        await gang.wait_until_over(handle.job_id)
        resume = await gang.newest_complete_checkpoint()
        # Another controller of this task, as a zombie, may have started the next generation since, and checkpoints of
        # that one be among those just seen; it has stored its handle before.
        stored = GangHandle.from_json(context["task_state_store"].get(STATE_KEY))
        if stored is not None and stored.plan_hash == handle.plan_hash and stored.generation > handle.generation:
            self.log.info("generation %d has been started by another process of this task", stored.generation)
            return stored, resume
        step = resume.step if resume else 0
        idle = handle.idle + 1 if _failed(states) and step <= handle.resumed_step else 0
        if idle >= MAX_IDLE_GENERATIONS:
            raise NoProgress(f"{idle} generations in a row ended without a complete checkpoint after step {step}")
        handle = replace(
            self._new_handle(context, plan, handle.generation + 1, handle.deadline), resumed_step=step, idle=idle
        )
        self._store(context, handle)
        self.log.info("generation %d starts from %s", handle.generation, resume.name if resume else "the beginning")
        return handle, resume

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """What the trigger saw becomes a result or one typed exception.

        Raises:
            TrainingFailed: the training ended with an error, or its ranks did not form one world.
            TrainingStopped: somebody stopped it on a node.
            DeadlineExceeded: ``max_runtime`` is over; the gang was stopped.
            NodeLost: a node's supervisor is dead, or the node was out of reach for too long.
        """
        plan = self.launch_plan
        handle = self._load_handle(context, plan)
        states = {name: protocol.from_dict(JobState, state) for name, state in event["states"].items()}
        if event["status"] == "deadline":
            self._stop(plan, handle.job_id, StopReason.DEADLINE)
            raise DeadlineExceeded(f"max_runtime of {plan.max_runtime:g} s is over; the training was stopped")
        if event["status"] == "lost":
            self._stop(plan, handle.job_id, "node lost")
            raise NodeLost("out of reach for too long: " + "; ".join(event["problems"].values()))
        if event["solo_world"]:
            raise TrainingFailed(
                "the ranks did not form one world, each trained alone: "
                f"seen on {', '.join(event['solo_world'])}; check NNODES, MASTER_ADDR and, on CPU clusters, use_cpu"
            )
        if all(ended_well(state) for state in states.values()):
            self._store(context, handle, finished=True)
            return result_of(handle, plan, states)
        failure = first_failure(states)
        if failure is None:
            raise TrainingFailed(f"unexpected end of job {handle.job_id}: {event}")
        superseded = cancelled_try(failure[1].stop_reason)
        if superseded is not None and superseded < context["ti"].try_number:
            self.log.info("%s was meant for an earlier try of this task; starting again", failure[1].stop_reason)
            return self.execute(context)
        if any(state.phase == Phase.LOST for state in states.values()):
            # Nobody looks after the ranks of a dead supervisor: they would hold their GPUs until the next try, if any.
            self._stop(plan, handle.job_id, "node lost")
        raise failure_of(failure, states, event["tails"])

    def _stop(self, plan: LaunchPlan, stopped_job: str, reason: str) -> None:
        group = self._group(plan)

        async def stop() -> dict[str, TrainingError]:
            async with group:
                return await Gang(plan, group, Owner(), {}).stop(stopped_job, reason)

        for name, error in asyncio.run(stop()).items():
            self.log.warning("%s was not reached to stop job %s: %s", name, stopped_job, error)

    def _group(self, plan: LaunchPlan) -> Any:
        return NodesHook.for_plan(plan).group()

    def _owner(self, context: Context) -> Owner:
        ti = context["ti"]
        return Owner(ti.dag_id, ti.run_id, ti.task_id, _map_index(ti), ti.try_number, origin())

    def _load_handle(self, context: Context, plan: LaunchPlan) -> GangHandle:
        """The stored handle; a new one is stored before it is used, so that no crash can double a gang."""
        handle = GangHandle.from_json(context["task_state_store"].get(STATE_KEY))
        if handle is not None and handle.plan_hash == _plan_hash(plan):
            return handle
        if handle is None:
            deadline = time.time() + plan.max_runtime if plan.max_runtime else None
            handle = self._new_handle(context, plan, 1, deadline)
        else:
            self.log.info("the plan has changed since generation %d", handle.generation)
            handle = self._new_handle(context, plan, handle.generation + 1, handle.deadline)
        self._store(context, handle)
        return handle

    def _new_handle(self, context: Context, plan: LaunchPlan, generation: int, deadline: float | None) -> GangHandle:
        ti = context["ti"]
        return GangHandle(
            generation=generation,
            job_id=job_id(ti.dag_id, ti.run_id, ti.task_id, _map_index(ti), generation),
            plan_hash=_plan_hash(plan),
            deadline=deadline,
        )

    def _store(self, context: Context, handle: GangHandle, finished: bool = False) -> None:
        context["task_state_store"].set(STATE_KEY, {**handle.to_json(), "finished": finished})


def _map_index(ti: Any) -> int:
    return ti.map_index if ti.map_index is not None else -1


def _failed(states: Mapping[str, JobState]) -> bool:
    """The generation ended of itself, after its training had begun, and no user ended it.

    A job that was only prepared, as beside a busy node, is no attempt: a run that waits for that node would else end
    for lack of progress long before its budget.
    """
    if any(cancelled_try(state.stop_reason) is not None for state in states.values()):
        return False
    return any(
        state.phase in Phase.ENDED
        and not ended_well(state)
        and is_root(state)
        and (state.child is not None or state.exit_code is not None)
        for state in states.values()
    )


def _plan_hash(plan: LaunchPlan) -> str:
    return digest(plan.model_dump_json())


def failure_of(
    failure: tuple[str, JobState], states: Mapping[str, JobState], tails: Mapping[str, Sequence[str]]
) -> TrainingError:
    """The exception for a gang that ended badly: the first cause, how every node ended, the lines that show it."""
    node, state = failure
    cause = diagnose(states, tails)
    shown = cause.node if cause else node
    text = "\n".join(
        [
            str(cause) if cause else describe_end(node, state),
            *(describe_end(name, other) for name, other in states.items()),
            f"last lines of {shown}:",
            *(f"  {line}" for line in tails.get(shown, [])[-SHOWN_LINES:]),
        ]
    )
    if state.phase == Phase.LOST or state.stop_reason == StopReason.SIGNAL:
        return NodeLost(text)
    if state.stop_reason == StopReason.DEADLINE:
        return DeadlineExceeded(text)
    if state.stop_reason == START_FAILED:  # another controller of this task could not start it
        return GangStartFailed(text)
    if not is_root(state):
        return TrainingStopped(text)
    return TrainingRefused(text) if cause and cause.permanent else TrainingFailed(text)
