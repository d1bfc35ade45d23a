"""The small JSON files through which a supervisor and the verbs speak: state, spec, stop, commit, journal."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from typing import Iterable, List, Optional, Set, Type, TypeVar

from trainer.files import read_bytes, write_atomic
from trainer.paths import JobPaths, NodePaths, PathError
from trainer.process import is_alive
from trainer.protocol import Identity, JobSpec, JobState, ProtocolError, dumps, from_dict, loads

T = TypeVar("T")


@dataclass(frozen=True)
class StopIntent:
    """Why a job shall end, and how long its processes have between TERM and KILL (``None``: as its spec says)."""

    reason: str = "requested"
    grace_s: Optional[float] = None


def read(cls: Type[T], path: str) -> Optional[T]:
    """The record in a file; ``None`` when there is none or it cannot be read."""
    data = read_bytes(path)
    if data is None:
        return None
    try:
        return loads(cls, data.decode("utf-8", "replace"))
    except ProtocolError:  # an unsynced file after a power cut: as good as none
        return None


def write_state(job: JobPaths, state: JobState, sync: bool = False) -> None:
    """Replace the state file; ``sync`` where a phase changes, so that a power cut cannot take it back."""
    write_atomic(job.state, dumps(state).encode(), sync)


def read_state(job: JobPaths) -> Optional[JobState]:
    """The state as its supervisor wrote it last, unproven; ``None`` when there is none or it cannot be read."""
    return read(JobState, job.state)


def write_spec(job: JobPaths, spec: JobSpec) -> None:
    """Keep the spec beside the job."""
    write_atomic(job.spec, dumps(spec).encode(), sync=True)


def read_spec(job: JobPaths) -> Optional[JobSpec]:
    """The spec that the job was started with."""
    return read(JobSpec, job.spec)


def write_stop(job: JobPaths, intent: StopIntent) -> None:
    """Leave the wish to stop where the supervisor finds it, whatever happens to the signal."""
    write_atomic(job.stop_request, json.dumps({"reason": intent.reason, "grace_s": intent.grace_s}).encode())


def read_stop(job: JobPaths) -> Optional[StopIntent]:
    """The wish to stop, if there is one."""
    return read(StopIntent, job.stop_request)


def write_commit(job: JobPaths) -> None:
    """Leave the word to start the training where the supervisor that waits for it finds it."""
    write_atomic(job.commit, b"{}")


def write_processes(job: JobPaths, processes: Iterable[Identity]) -> None:
    """Journal the tree, so that it is found again after its supervisor was killed, even without the marker."""
    rows = sorted([p.pid, p.start_ticks, p.boot_id] for p in processes)
    write_atomic(job.processes, json.dumps(rows).encode())


def read_processes(job: JobPaths) -> Set[Identity]:
    """The journalled processes that are still alive."""
    found = set()
    with contextlib.suppress(ValueError, TypeError):
        for pid, start_ticks, boot in json.loads(read_bytes(job.processes) or b"[]"):
            found.add(from_dict(Identity, {"pid": pid, "start_ticks": start_ticks, "boot_id": boot}))
    return {identity for identity in found if is_alive(identity)}


def known_jobs(node: NodePaths) -> List[JobPaths]:
    """Every job that this node has a folder of."""
    try:
        names = sorted(entry.name for entry in os.scandir(node.jobs) if entry.is_dir())
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        with contextlib.suppress(PathError):  # somebody else's folder
            found.append(node.job(name))
    return found
