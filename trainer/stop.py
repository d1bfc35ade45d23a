"""Bringing jobs to an end: the ``stop`` and ``cancel`` verbs, and the burial of jobs whose supervisor is dead."""

from __future__ import annotations

import os
import signal
import time
from typing import List, Optional, Set, Tuple

from trainer import cancelled, lease, process, records
from trainer.files import locked
from trainer.jobs import is_buried, processes_of, proven_state
from trainer.paths import JobPaths, NodePaths, PathError
from trainer.protocol import (
    CancelReply,
    CancelRequest,
    Identity,
    JobState,
    Owner,
    Phase,
    StopReply,
    StopRequest,
)

START_LOCK_S = 90.0  # that a verb waits for a start on this node
REAP_S = 20.0  # of KILL after which the processes that are left are reported
HURRIED_REAP_S = 2.0  # the same, where the caller must not wait


# -- on request -----------------------------------------------------------------------------------------------


def stop(request: StopRequest) -> StopReply:
    """Ask the supervisor to end the job; a job without a supervisor is ended here.

    A start that is under way on this node is waited for, so that a stop is never overtaken by it.
    """
    node = NodePaths(request.workdir)
    job = node.job(request.job_id)
    intent = records.StopIntent(request.reason, request.grace_s)
    if os.path.exists(node.start_lock):
        with locked(node.start_lock, START_LOCK_S):
            state = _ask(node, job, intent)
    else:
        state = proven_state(job)
    deadline = time.monotonic() + request.wait_s
    while state.phase in Phase.ALIVE and time.monotonic() < deadline:
        time.sleep(0.1)
        state = proven_state(job)
    if state.phase == Phase.LOST and not is_buried(job):  # the supervisor was killed while it stopped the job
        state = _reap(node, job, intent)
    return StopReply(state, stopped=state.phase not in Phase.ALIVE and not state.survivors)


def cancel(request: CancelRequest) -> CancelReply:
    """Ask every living job of this task, up to this try, to end, and remember that none of them may start.

    Returns without waiting for their end; a start that is under way on this node is waited for and ended too.

    Raises:
        ValueError: the owner names no task.
    """
    if not (request.owner.dag_id and request.owner.run_id and request.owner.task_id):
        raise ValueError("cancel: the owner must name dag_id, run_id and task_id")
    node = NodePaths(request.workdir)
    node.create()
    intent = records.StopIntent(request.reason, request.grace_s)
    with locked(node.start_lock, START_LOCK_S):
        cancelled.remember(node, request.owner)
        meant = [job for job in records.known_jobs(node) if _is_meant(job, request.owner)]
        return CancelReply([_ask(node, job, intent, HURRIED_REAP_S) for job in meant])


def _is_meant(job: JobPaths, owner: Owner) -> bool:
    if not (proven_state(job).phase in Phase.ALIVE or needs_burial(job)):
        return False
    spec = records.read_spec(job)
    return spec is not None and spec.owner.same_task(owner) and spec.owner.try_number <= owner.try_number


def _ask(node: NodePaths, job: JobPaths, intent: records.StopIntent, patience_s: float = REAP_S) -> JobState:
    state = proven_state(job)
    if state.phase == Phase.LOST and not is_buried(job):
        return _reap(node, job, intent, patience_s)
    if state.phase in Phase.ALIVE and state.supervisor is not None:
        records.write_stop(job, intent)
        process.send_signal(state.supervisor, signal.SIGTERM)
        state = proven_state(job)
    return state


# -- without a supervisor -------------------------------------------------------------------------------------


def _reap(node: NodePaths, job: JobPaths, intent: records.StopIntent, patience_s: float = REAP_S) -> JobState:
    killed, left = process.kill_until_empty(lambda: processes_of(node, job), patience_s)
    if left:
        state = proven_state(job)
        state.survivors = left
        return state
    return _write_burial(job, killed, intent.reason)


def needs_burial(job: JobPaths) -> bool:
    """Whether the job is lost and its end has not been written down."""
    return proven_state(job).phase == Phase.LOST and not is_buried(job)


def bury_lost_jobs(node: NodePaths) -> Tuple[int, List[int]]:
    """End every process of this node that has no supervisor, and write the last state of its job.

    Returns how many were killed, and the pids that cannot be ended. Jobs that run beside are left alone.
    """
    lost = [job for job in records.known_jobs(node) if needs_burial(job)]

    def find() -> Set[Identity]:
        # First the processes, then their supervisors: a supervisor is on record before its training starts.
        strays = {item for item, job_id in process.markers(node.workdir).items() if not _is_supervised(node, job_id)}
        found = strays.union(*(records.read_processes(job) for job in lost))
        return found | process.descendants([identity.pid for identity in found])

    killed, left = process.kill_until_empty(find, REAP_S)
    if not left:
        for job in lost:
            _write_burial(job, killed)
    return killed, left


def _is_supervised(node: NodePaths, job_id: str) -> bool:
    """Whether the supervisor of a job lives, by the job's own record or by that of its lease."""
    try:
        state = records.read_state(node.job(job_id))
    except PathError:
        return False
    if state is not None and process.is_alive(state.supervisor):
        return True
    return job_id in {holder.job_id for holder in lease.holders(node)}


def _write_burial(job: JobPaths, killed: int, reason: Optional[str] = None) -> JobState:
    state = proven_state(job)
    state.ended_at = time.time()
    state.killed = killed
    state.stop_reason = reason
    state.survivors = []
    records.write_state(job, state, sync=True)
    return state
