"""How fast a transfer may go and how far it is: a cap on bytes per second, a meter, the last place in every queue."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
import time
from collections import deque
from typing import Deque, Optional, Tuple

_WINDOW_S = 20.0  # over which the rate is measured
_BURST_S = 0.25  # what may be sent at once after a pause, in seconds of the rate
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # numbers of the system call, from the kernel's unistd tables
_IOPRIO_IDLE = 3 << 13  # class "idle": the disk is read only when nobody else wants it


class Pace:
    """A cap on the bytes per second that all threads together send or receive, and the count of those bytes.

    Args:
        total: bytes that there are to do, for the time left.
        bytes_per_second: the cap; 0: none.
    """

    def __init__(self, total: int = 0, bytes_per_second: int = 0) -> None:
        self.total, self.done = total, 0
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._seen: Deque[Tuple[float, int]] = deque([(self._began, 0)])

    def take(self, count: int) -> None:
        """Wait until ``count`` more bytes may go, and count them."""
        with self._lock:
            now = time.monotonic()
            self.done += count
            self._note(now)
            if not self._rate:
                return
            self._free_at = max(self._free_at, now - _BURST_S) + count / self._rate
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)

    def skip(self, count: int) -> None:
        """Count bytes that need not be sent, or give back (negative) those that must be sent again."""
        with self._lock:
            self.done += count

    def _note(self, now: float) -> None:
        if now - self._seen[-1][0] >= 0.2:
            self._seen.append((now, self.done))
            while now - self._seen[0][0] > _WINDOW_S and len(self._seen) > 2:
                self._seen.popleft()

    @property
    def rate(self) -> float:
        """Bytes per second over the last 20 seconds."""
        with self._lock:
            then, before = self._seen[0]
            seconds = time.monotonic() - then
            return max(0.0, (self.done - before) / seconds) if seconds > 0 else 0.0

    @property
    def remaining_s(self) -> Optional[float]:
        """Seconds left at the present rate; ``None`` when nothing moves."""
        rate = self.rate
        return max(0, self.total - self.done) / rate if rate > 0 else None


def yield_to_others() -> None:
    """Make this process read the disk only when nobody else does, and give it the last place for the processor.

    Threads started afterwards inherit both. What the kernel does not grant is left as it is.
    """
    with contextlib.suppress(OSError):
        os.nice(19)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_IDLE)  # 1: a process, 0: this one
