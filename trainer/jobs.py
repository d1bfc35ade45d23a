"""Jobs as a caller sees them: attach-or-start, the proven state, stop, and the list of all jobs of a node."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import time
from typing import Dict, Iterator, List, Optional, Set, Tuple

from trainer import process, records
from trainer.detach import agent_command, agent_environment, read_all, spawn_detached
from trainer.files import is_locked, locked, open_lock, try_lock, write_atomic
from trainer.manifest import is_plain
from trainer.paths import JobPaths, NodePaths, PathError
from trainer.protocol import (
    Holder,
    Identity,
    JobSpec,
    JobsReply,
    JobsRequest,
    JobState,
    Phase,
    StartReply,
    StartRequest,
    StartResult,
    StatusReply,
    StatusRequest,
    StopReply,
    StopRequest,
)

READY_S = 60.0  # that a new supervisor has to say that the training runs
START_LOCK_S = 90.0  # that a start waits for another start on this node
LOG_BYTES = 8 << 20  # the most log bytes in one reply


# -- what is true ---------------------------------------------------------------------------------------------


def proven_state(job: JobPaths) -> JobState:
    """The state of a job, with ``lost`` in place of a living phase whose supervisor is dead."""
    state = records.read_state(job)
    if state is not None and state.phase in Phase.ALIVE and not process.is_alive(state.supervisor):
        state = records.read_state(job)  # it may have ended between the two looks
    if state is None:
        return _without_state(job)
    if state.phase in Phase.ALIVE and not process.is_alive(state.supervisor):
        state.phase = Phase.LOST
        state.error = _why_lost(state)
    with contextlib.suppress(OSError):
        state.log_bytes = os.stat(job.log).st_size
    return state


def _without_state(job: JobPaths) -> JobState:
    if os.path.exists(job.state) or os.path.exists(job.log):
        return JobState(job.job_id, Phase.LOST, error="state.json is missing or damaged, as after a power cut")
    return JobState(job.job_id, Phase.ABSENT)


def _why_lost(state: JobState) -> str:
    if state.supervisor is not None and state.supervisor.boot_id != process.boot_id():
        return "the machine was restarted while the job ran"
    pid = state.supervisor.pid if state.supervisor else "?"
    return f"the supervisor (pid {pid}) died without a word, as by kill -9 or the out-of-memory killer"


def processes_of(node: NodePaths, job: JobPaths) -> Set[Identity]:
    """Every living process of a job that has no supervisor: by marker, by journal, and whatever descends from those."""
    found = process.marked(node.workdir, job.job_id) | records.read_processes(job)
    return found | process.descendants([identity.pid for identity in found])


# -- start ----------------------------------------------------------------------------------------------------


def start(request: StartRequest) -> StartReply:
    """Attach to the job or start it. Of any number of concurrent starts on a node, one at most starts something.

    Raises:
        PathError: the work folder, the job id or a file name is refused.
        TimeoutError: another start did not come to an end.
    """
    node = NodePaths(request.workdir)
    job = node.job(request.spec.job_id)
    attachments = {job.attachment(name): text for name, text in request.spec.files.items()}
    node.create()
    with locked(node.start_lock, START_LOCK_S):
        state = proven_state(job)
        if state.phase not in (Phase.ABSENT, Phase.LOST):
            return StartReply(StartResult.ATTACHED, state)
        lease = open_lock(node.lease)
        try:
            if not try_lock(lease):
                return _busy(node, state)
            return _start_on_free_node(node, job, request.spec, attachments, lease)
        finally:
            os.close(lease)


def _busy(node: NodePaths, state: JobState) -> StartReply:
    if state.phase == Phase.LOST:
        return StartReply(StartResult.ATTACHED, state)
    return StartReply(StartResult.BUSY, holder=records.read_holder(node) or Holder("unknown"))


def _start_on_free_node(
    node: NodePaths, job: JobPaths, spec: JobSpec, attachments: Dict[str, str], lease: int
) -> StartReply:
    # We hold the lease: whatever still runs here has no supervisor, and nothing may start beside it.
    reaped, left = _bury_lost_jobs(node)
    if left:
        error = f"processes of an earlier job cannot be ended (stuck in the kernel?): pids {left}"
        return StartReply(StartResult.FAILED, reaped=reaped, error=error)
    state = proven_state(job)
    if state.phase != Phase.ABSENT:  # it was lost; a lost job is ended, never silently started again
        return StartReply(StartResult.ATTACHED, state, reaped=reaped)
    try:
        _complete_checkpoint(spec)
        job.create()
        for path, text in attachments.items():
            write_atomic(path, text.encode())
        records.write_spec(job, spec)
        error = _spawn(node, job, lease)
    except (OSError, PathError) as problem:
        error = str(problem)
    if error != "ok":
        shutil.rmtree(job.folder, ignore_errors=True)
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


def _spawn(node: NodePaths, job: JobPaths, lease: int) -> str:
    """Run the supervisor; ``"ok"`` once the training runs, else why it does not."""
    reader, writer = os.pipe()
    try:
        command = agent_command("_supervise", node.workdir, job.job_id, str(lease), str(writer))
        spawn_detached(command, agent_environment(), job.supervisor_log, keep=(lease, writer))
        os.close(writer)
        writer = -1
        answer = read_all(reader, READY_S).decode("utf-8", "replace")
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
    return answer or "the supervisor did not start: " + _last_line(job.supervisor_log)


def _last_line(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        lines = stream.read()[-4096:].decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
    return "it said nothing"


def _bury_lost_jobs(node: NodePaths) -> Tuple[int, List[int]]:
    """End every process without a supervisor on this node and write the last state of its job."""
    lost = [job for job in map(node.job, _valid_ids(node)) if _needs_burial(job)]

    def find() -> Set[Identity]:
        found = process.marked(node.workdir).union(*(records.read_processes(job) for job in lost))
        return found | process.descendants([identity.pid for identity in found])

    killed, left = process.kill_until_empty(find)
    if not left:
        for job in lost:
            _write_burial(job, killed)
    return killed, left


def _needs_burial(job: JobPaths) -> bool:
    return proven_state(job).phase == Phase.LOST and not _is_buried(job)


def _is_buried(job: JobPaths) -> bool:
    state = records.read_state(job)
    return state is not None and state.phase == Phase.LOST


def _write_burial(job: JobPaths, killed: int, reason: Optional[str] = None) -> JobState:
    state = proven_state(job)
    state.ended_at = time.time()
    state.killed = killed
    state.stop_reason = reason
    state.survivors = []
    records.write_state(job, state, sync=True)
    return state


def _valid_ids(node: NodePaths) -> Iterator[str]:
    for job_id in records.job_ids(node):
        with contextlib.suppress(ValueError):
            yield node.job(job_id).job_id


# -- status, stop, jobs ---------------------------------------------------------------------------------------


def status(request: StatusRequest) -> StatusReply:
    """The proven state, orphans of a lost job, and log bytes from the given offset on."""
    node = NodePaths(request.workdir)
    job = node.job(request.job_id)
    state = proven_state(job)
    orphans: List[int] = []
    if state.phase == Phase.LOST and not _is_buried(job):
        orphans = sorted(identity.pid for identity in processes_of(node, job))
    log = _read_log(job.log, request.log_offset, min(request.max_bytes, LOG_BYTES))
    return StatusReply(state, base64.b64encode(log).decode("ascii"), request.log_offset, orphans)


def _read_log(path: str, offset: int, size: int) -> bytes:
    if size <= 0:
        return b""
    try:
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(size)
    except FileNotFoundError:
        return b""


def stop(request: StopRequest) -> StopReply:
    """Ask the supervisor to end the job; a job without a supervisor is ended here.

    A start that is under way on this node is waited for, so that a stop is never overtaken by it.
    """
    node = NodePaths(request.workdir)
    job = node.job(request.job_id)
    if os.path.exists(node.start_lock):
        with locked(node.start_lock, START_LOCK_S):
            state = _ask_to_stop(node, job, request)
    else:
        state = proven_state(job)
    deadline = time.monotonic() + request.wait_s
    while state.phase in Phase.ALIVE and time.monotonic() < deadline:
        time.sleep(0.1)
        state = proven_state(job)
    if state.phase == Phase.LOST and not _is_buried(job):  # the supervisor was killed while it stopped the job
        state = _reap(node, job, request)
    return StopReply(state, stopped=state.phase not in Phase.ALIVE and not state.survivors)


def _ask_to_stop(node: NodePaths, job: JobPaths, request: StopRequest) -> JobState:
    state = proven_state(job)
    if state.phase == Phase.LOST and not _is_buried(job):
        return _reap(node, job, request)
    if state.phase in Phase.ALIVE and state.supervisor is not None:
        records.write_stop(job, records.StopIntent(request.reason, request.grace_s))
        process.send_signal(state.supervisor, signal.SIGTERM)
        state = proven_state(job)
    return state


def _reap(node: NodePaths, job: JobPaths, request: StopRequest) -> JobState:
    killed, left = process.kill_until_empty(lambda: processes_of(node, job))
    if left:
        state = proven_state(job)
        state.survivors = left
        return state
    return _write_burial(job, killed, request.reason)


def jobs(request: JobsRequest) -> JobsReply:
    """Every job that this node knows, oldest first, and who holds the lease."""
    node = NodePaths(request.workdir)
    states = [proven_state(node.job(job_id)) for job_id in _valid_ids(node)]
    known = [state for state in states if state.phase != Phase.ABSENT]
    return JobsReply(sorted(known, key=lambda state: state.started_at), records.read_holder(node))


def log_is_held(job: JobPaths) -> bool:
    """Whether any process of the job still has its log open: proof that something trains, supervisor or not."""
    return is_locked(job.log)
