"""Watching the ranks themselves: a dead rank is known at once, long before its launcher or its peers notice."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Tuple

from trainer.process import Stat, open_pidfd, read_environ, read_stat
from trainer.protocol import Identity

_LOG_TAIL = 256 * 1024  # bytes of the log that are searched for the launcher's own word on a dead rank
_LOG_PATIENCE_S = 10.0


@dataclass(frozen=True)
class RankDeath:
    """A rank that ended abnormally; ``at`` is monotonic time in seconds."""

    rank: str
    pid: int
    how: str
    at: float

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}) died: {self.how}"


def describe_status(status: int) -> Optional[str]:
    """Words for a wait status; ``None`` for a clean end."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"signal {number}"
    code = os.WEXITSTATUS(status)
    return f"exit code {code}" if code else None


def find_in_log(log: str, pid: int) -> Optional[str]:
    """What torchrun said of a rank that ended, from the last part of the log; ``None`` when it said nothing."""
    try:
        with open(log, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _LOG_TAIL))
            tail = stream.read()
    except OSError:
        return None
    match = re.search(rb"exitcode: (-?\d+)\)[^\n]{0,80}\(pid: %d\)" % pid, tail)
    return f"exit code {match.group(1).decode()}" if match and match.group(1) != b"0" else None


@dataclass
class _Rank:
    rank: str
    identity: Identity
    pidfd: Optional[int]


class RankWatch:
    """Knows the ranks of a tree and how each of them ended.

    A rank is a process with ``RANK`` in its environment whose parent has none (a dataloader worker inherits its rank's
    environment). How it ended is read from its zombie in the instant before its launcher collects it; when that is
    missed, from what the launcher writes into the log; when neither tells, it counts as a clean end.
    """

    def __init__(self, poll: select.poll, log: str) -> None:
        self._poll = poll
        self._log = log
        self._ranks: Dict[int, _Rank] = {}
        self._known: Dict[Identity, Optional[str]] = {}
        self._unclear: List[Tuple[float, _Rank]] = []
        self.deaths: List[RankDeath] = []

    def update(self, tree: Iterable[Identity], processes: Dict[int, Stat]) -> None:
        """Learn new ranks from the processes of the tree, as one scan saw them."""
        # "No rank" is never remembered: a process seen between fork and exec still has its parent's environment.
        current = {identity: self._known.get(identity) or self._rank_of(identity.pid) for identity in tree}
        self._known = current
        by_pid = {identity.pid: rank for identity, rank in current.items()}
        for identity, rank in current.items():
            stat = processes.get(identity.pid)
            if rank is None or stat is None or identity.pid in self._ranks or by_pid.get(stat.ppid) is not None:
                continue
            self._add(rank, identity)

    @staticmethod
    def _rank_of(pid: int) -> Optional[str]:
        for item in read_environ(pid):
            if item.startswith(b"RANK="):
                return item[5:].decode("ascii", "replace")
        return None

    def _add(self, rank: str, identity: Identity) -> None:
        pidfd = open_pidfd(identity.pid)
        if pidfd is not None:
            self._poll.register(pidfd, select.POLLIN)
        self._ranks[identity.pid] = _Rank(rank, identity, pidfd)

    def check(self) -> None:
        """Notice the ranks that ended since the last call."""
        for pid, rank in list(self._ranks.items()):
            stat = read_stat(pid)
            same = stat is not None and stat.start_ticks == rank.identity.start_ticks
            if same and stat is not None and stat.state not in "ZX":
                continue
            del self._ranks[pid]
            if rank.pidfd is not None:
                self._poll.unregister(rank.pidfd)
                os.close(rank.pidfd)
            if same and stat is not None:
                self._record(rank, describe_status(stat.exit_status))
            else:
                self._unclear.append((time.monotonic(), rank))
        self._ask_log()

    def _ask_log(self) -> None:
        for entry in list(self._unclear):
            since, rank = entry
            how = find_in_log(self._log, rank.identity.pid)
            if how is not None or time.monotonic() - since > _LOG_PATIENCE_S:
                self._unclear.remove(entry)
                self._record(rank, how)

    def _record(self, rank: _Rank, how: Optional[str]) -> None:
        if how is not None:
            self.deaths.append(RankDeath(rank.rank, rank.identity.pid, how, time.monotonic()))
