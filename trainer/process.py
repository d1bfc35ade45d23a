"""Processes that cannot be confused: identity, proof of life, signals without races, and finding a whole tree.

A pid alone names a process only until the kernel hands it out again. An :class:`~trainer.protocol.Identity` adds the
start time and the boot, and signals go through a pidfd that is compared with it first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import time
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple, Union

from trainer.protocol import MARKER, Identity

_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


class Stat(NamedTuple):
    """What ``/proc/<pid>/stat`` says. ``exit_status`` is a wait status, meaningful for a zombie only."""

    state: str
    ppid: int
    pgrp: int
    start_ticks: int
    exit_status: int


@functools.lru_cache(maxsize=1)
def boot_id() -> str:
    """The kernel's id of this boot; another value means that the machine was restarted."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        return stream.read().strip()


def read_stat(pid: int) -> Optional[Stat]:
    """The state of a process, or ``None`` when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            # The command's name may hold blanks and ')': everything after the last ')' is fields.
            fields = stream.read().rpartition(b")")[2].split()
    except _GONE:
        return None
    if len(fields) < 20:
        return None
    exit_status = int(fields[49]) if len(fields) > 49 else 0
    return Stat(fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[19]), exit_status)


def read_environ(pid: int) -> List[bytes]:
    """The environment that a process was started with, as ``NAME=value`` items; empty when it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return stream.read().split(b"\0")
    except (OSError, ValueError):
        return []


def identify(pid: int) -> Optional[Identity]:
    """The identity of a running process, or ``None`` when it is gone."""
    stat = read_stat(pid)
    return Identity(pid, stat.start_ticks, boot_id()) if stat else None


def is_alive(identity: Optional[Identity]) -> bool:
    """Whether exactly this process still runs. A zombie is dead unless other threads of it still live."""
    if identity is None or identity.boot_id != boot_id():
        return False
    stat = read_stat(identity.pid)
    return stat is not None and stat.start_ticks == identity.start_ticks and _runs(identity.pid, stat)


def _runs(pid: int, stat: Stat) -> bool:
    if stat.state not in "ZX":
        return True
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except _GONE:
        return False


def open_pidfd(pid: int) -> Optional[int]:
    """A descriptor that becomes readable when the process ends, or ``None`` (process gone, kernel before 5.3)."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def send_signal(identity: Identity, number: int) -> bool:
    """Signal exactly this process; ``False`` when it is gone. Where pidfds exist, a reused pid is never hit.

    Raises:
        PermissionError: the process belongs to another user.
    """
    descriptor = open_pidfd(identity.pid)
    try:
        if not is_alive(identity):
            return False
        if descriptor is None:
            os.kill(identity.pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return True


def become_subreaper() -> None:
    """Make every orphaned descendant a child of this process, so that ``waitpid`` knows when the last one ended.

    Raises:
        OSError: the kernel refuses (older than 3.4).
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """What ``ps`` and ``top`` call this process; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, value: Union[int, bytes]) -> None:
    import ctypes  # costs every verb's start milliseconds, and few need it

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def node_key(workdir: str) -> str:
    """A short name of a node: nodes on one machine share a PID space and are told apart by their work folder."""
    return hashlib.sha256(os.fsencode(os.path.realpath(workdir))).hexdigest()[:12]


def marker(workdir: str, job_id: str) -> str:
    """The value of the marker variable in the environment of each process of a job."""
    return f"{node_key(workdir)}/{job_id}"


def all_pids() -> Iterator[int]:
    """The pids of all processes that this user can see."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def table() -> Dict[int, Stat]:
    """All processes at this instant, zombies included."""
    found = ((pid, read_stat(pid)) for pid in all_pids())
    return {pid: stat for pid, stat in found if stat is not None}


def markers(workdir: str) -> Dict[Identity, str]:
    """The running processes that carry this node's marker, each with the job id that it names."""
    wanted = f"{MARKER}={marker(workdir, '')}".encode()
    found = {}
    for pid in all_pids():
        job_id = next((item[len(wanted) :] for item in read_environ(pid) if item.startswith(wanted)), None)
        identity = identify(pid) if job_id is not None and pid != os.getpid() else None
        if job_id is not None and identity is not None and is_alive(identity):
            found[identity] = os.fsdecode(job_id)
    return found


def marked(workdir: str, job_id: Optional[str] = None) -> Set[Identity]:
    """The running processes that carry this node's marker, of one job or of any."""
    return {identity for identity, name in markers(workdir).items() if job_id in (None, name)}


def descendants(roots: Iterable[int], processes: Optional[Dict[int, Stat]] = None) -> Set[Identity]:
    """The running processes below ``roots``, which are not part of the answer."""
    processes = table() if processes is None else processes
    children: Dict[int, List[int]] = {}
    for pid, stat in processes.items():
        children.setdefault(stat.ppid, []).append(pid)
    found, todo = set(), list(roots)
    while todo:
        for pid in children.pop(todo.pop(), []):
            todo.append(pid)
            if _runs(pid, processes[pid]):
                found.add(Identity(pid, processes[pid].start_ticks, boot_id()))
    return found


def kill_all(processes: Iterable[Identity]) -> Set[Identity]:
    """SIGKILL to each; the answer holds those that were still there."""
    hit = set()
    for identity in processes:
        with contextlib.suppress(PermissionError):
            if send_signal(identity, signal.SIGKILL):
                hit.add(identity)
    return hit


def kill_until_empty(find: Callable[[], Set[Identity]], limit_s: float = 20.0) -> Tuple[int, List[int]]:
    """SIGKILL whatever ``find`` finds until it finds nothing twice in a row (a fork can hide from one scan).

    Returns how many processes were killed, and the pids that are left after ``limit_s`` seconds (stuck in the kernel).
    """
    killed: Set[Identity] = set()
    empty, deadline = 0, time.monotonic() + limit_s
    while True:
        left = find()
        empty = 0 if left else empty + 1
        if empty == 2:
            return len(killed), []
        if left and time.monotonic() > deadline:
            return len(killed), sorted(identity.pid for identity in left)
        killed |= kill_all(left)
        time.sleep(0.02)
