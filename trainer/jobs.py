"""Jobs as a caller sees them: the proven state, the log, and the list of all jobs of a node."""

from __future__ import annotations

import base64
import contextlib
import os
from typing import List, Set

from trainer import lease, process, records
from trainer.files import is_locked
from trainer.paths import JobPaths, NodePaths
from trainer.protocol import (
    Identity,
    JobsReply,
    JobsRequest,
    JobState,
    Phase,
    StatusReply,
    StatusRequest,
)

LOG_BYTES = 8 << 20  # the most log bytes in one reply


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


def is_buried(job: JobPaths) -> bool:
    """Whether the end of a lost job has been written down: none of its processes is left."""
    state = records.read_state(job)
    return state is not None and state.phase == Phase.LOST


def processes_of(node: NodePaths, job: JobPaths) -> Set[Identity]:
    """Every living process of a job that has no supervisor: by marker, by journal, and whatever descends from those."""
    found = process.marked(node.workdir, job.job_id) | records.read_processes(job)
    return found | process.descendants([identity.pid for identity in found])


def status(request: StatusRequest) -> StatusReply:
    """The proven state, orphans of a lost job, and log bytes from the given offset on."""
    node = NodePaths(request.workdir)
    job = node.job(request.job_id)
    state = proven_state(job)
    orphans: List[int] = []
    if state.phase == Phase.LOST and not is_buried(job):
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


def jobs(request: JobsRequest) -> JobsReply:
    """Every job that this node knows, oldest first, and who holds its leases."""
    node = NodePaths(request.workdir)
    states = [proven_state(job) for job in records.known_jobs(node)]
    known = [state for state in states if state.phase != Phase.ABSENT]
    holders = lease.holders(node)
    return JobsReply(sorted(known, key=lambda state: state.started_at), next(iter(holders), None), holders)


def log_is_held(job: JobPaths) -> bool:
    """Whether any process of the job still has its log open: proof that something trains, supervisor or not."""
    return is_locked(job.log)
