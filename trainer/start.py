"""The ``start`` and ``commit`` verbs: attach to a job or start it, at once or in two steps."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from typing import Dict, List

from trainer import cancelled, process, records
from trainer.detach import spawn_detached
from trainer.files import locked, remove_quietly, write_atomic
from trainer.jobs import processes_of, proven_state
from trainer.launch import refuse_nonsense
from trainer.lease import Busy, leased
from trainer.manifest import is_plain
from trainer.paths import JobPaths, NodePaths, PathError
from trainer.protocol import (
    CommitReply,
    CommitRequest,
    JobSpec,
    JobState,
    Phase,
    StartReply,
    StartRequest,
    StartResult,
)
from trainer.stop import START_LOCK_S, bury_lost_jobs

READY_S = 60  # that a new supervisor has to say that the training runs, or is prepared
COMMIT_S = 30.0  # that a supervisor has to take up the word to start


# -- start ----------------------------------------------------------------------------------------------------


def start(request: StartRequest) -> StartReply:
    """Attach to the job or start it. Of any number of concurrent starts on a node, one at most starts something.

    With ``hold_s`` the job is only prepared: its lease is taken and its supervisor waits for ``commit``.

    Raises:
        PathError: the work folder, the job id or a file name is refused.
        TimeoutError: another start did not come to an end.
    """
    node = NodePaths(request.workdir)
    job = node.job(request.spec.job_id)
    attachments = {job.attachment(name): text for name, text in request.spec.files.items()}
    node.create()
    with locked(node.start_lock, START_LOCK_S) as turn:
        state = proven_state(job)
        if cancelled.is_cancelled(node, request.spec.owner):
            return StartReply(StartResult.CANCELLED, None if state.phase == Phase.ABSENT else state)
        if state.phase not in (Phase.ABSENT, Phase.LOST):
            return StartReply(StartResult.ATTACHED, state)
        try:
            refuse_nonsense(request.spec)
            with leased(node, request.spec.gpus) as lease:
                return _start_with_lease(node, job, request, attachments, [turn, *lease])
        except ValueError as error:
            return StartReply(StartResult.FAILED, error=str(error))
        except Busy as busy:
            if state.phase == Phase.LOST:
                return StartReply(StartResult.ATTACHED, state)
            return StartReply(StartResult.BUSY, holder=busy.holder)


def _start_with_lease(
    node: NodePaths, job: JobPaths, request: StartRequest, attachments: Dict[str, str], locks: List[int]
) -> StartReply:
    # The GPUs are ours: whatever still runs on them has no supervisor, and nothing may start beside it.
    reaped, left = bury_lost_jobs(node)
    if left:
        error = f"processes of an earlier job cannot be ended (stuck in the kernel?): pids {left}"
        return StartReply(StartResult.FAILED, reaped=reaped, error=error)
    state = proven_state(job)
    if state.phase != Phase.ABSENT:  # it was lost; a lost job is ended, never silently started again
        return StartReply(StartResult.ATTACHED, state, reaped=reaped)
    try:
        _complete_checkpoint(request.spec)
        job.create()
        remove_quietly(job.commit)
        for path, text in attachments.items():
            write_atomic(path, text.encode())
        records.write_spec(job, request.spec)
        error = _spawn(node, job, locks, request.hold_s)
    except (OSError, PathError) as problem:
        error = str(problem)
    if error != "ok":
        _undo(node, job)
        return StartReply(StartResult.FAILED, reaped=reaped, error=error)
    return StartReply(StartResult.STARTED, proven_state(job), reaped=reaped)


def _complete_checkpoint(spec: JobSpec) -> None:
    """Without a shared disk DeepSpeed's ``latest`` is on one node only, and every other node cannot resume."""
    for name, text in spec.resume_files.items():
        if not is_plain(name) or not os.path.isabs(spec.output_dir):
            raise PathError(f"resume file {name!r} is refused: it must be a plain path below an absolute output_dir")
        path = os.path.join(spec.output_dir, name)
        if not os.path.exists(path) or os.path.getsize(path) == 0:
            write_atomic(path, text.encode(), sync=True)


def _spawn(node: NodePaths, job: JobPaths, locks: List[int], hold_s: float) -> str:
    """Run the supervisor; ``"ok"`` once the training runs or is prepared, else why it does not.

    It inherits the locks: the lease until the job's end, and the start lock until the job is on record, so that no
    stop and no other start misses it, even when this process is killed.
    """
    from trainer.supervise import supervise  # not needed by the other verb of this module

    turn, *lease = locks

    def body(ready: int) -> int:
        return supervise(node, job, ready=ready, turn=turn, lease=lease, hold_s=hold_s)

    answer = spawn_detached(body, job.supervisor_log, locks, READY_S)
    return answer or "the supervisor did not start: " + _last_line(job.supervisor_log)


def _undo(node: NodePaths, job: JobPaths) -> None:
    """Leave nothing behind, not even a supervisor that was too slow to answer."""
    state = records.read_state(job)
    shutil.rmtree(job.folder, ignore_errors=True)  # a supervisor that comes to life later finds no spec
    if state is not None and state.supervisor is not None:
        process.send_signal(state.supervisor, signal.SIGKILL)
    process.kill_until_empty(lambda: processes_of(node, job))


def _last_line(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        lines = stream.read()[-4096:].decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
    return "it said nothing"


# -- commit ---------------------------------------------------------------------------------------------------


def commit(request: CommitRequest) -> CommitReply:
    """Let a prepared job start its training; fine when it runs already. The supervisor decides, not this word.

    Raises:
        PathError: the work folder or the job id is refused.
    """
    job = NodePaths(request.workdir).job(request.job_id)
    state = proven_state(job)
    if state.phase != Phase.PREPARING:
        return CommitReply(state, None if state.phase == Phase.RUNNING else _why_not(state))
    records.write_commit(job)
    if state.supervisor is not None:
        process.send_signal(state.supervisor, signal.SIGUSR1)
    deadline = time.monotonic() + COMMIT_S
    while state.phase == Phase.PREPARING and time.monotonic() < deadline:
        time.sleep(0.01)
        state = proven_state(job)
    started = state.child is not None and state.phase != Phase.LOST  # and perhaps ended since
    return CommitReply(state, None if started else _why_not(state))


def _why_not(state: JobState) -> str:
    if state.phase == Phase.ABSENT:
        return f"this node has no job {state.job_id}"
    if state.phase == Phase.PREPARING:
        return f"the supervisor did not take up the word to start within {COMMIT_S:g} s; it still may"
    if state.phase == Phase.STOPPING:
        return f"the job is being stopped ({state.stop_reason})"
    how = state.stop_reason or (f"signal {state.signal}" if state.signal else f"exit code {state.exit_code}")
    return f"the job has ended already: {state.phase}, {state.error or how}"
