"""What the server has been asked so far."""

import threading
from collections import Counter


class Stats:
    """Counts since the start: requests by operation, errors by code, bytes of bodies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._bytes_in = 0
        self._bytes_out = 0

    def count(self, operation: str, error: str, bytes_in: int) -> None:
        """Add one request with what its body brought; ``operation`` and ``error`` (a code) may be empty."""
        with self._lock:
            if operation:
                self._requests[operation] += 1
            if error:
                self._errors[error] += 1
            self._bytes_in += bytes_in

    def count_sent(self, bytes_out: int) -> None:
        """Add bytes of a reply's body."""
        with self._lock:
            self._bytes_out += bytes_out

    def state(self) -> dict[str, object]:
        """Return the counts: ``requests``, ``errors``, ``bytes_in``, ``bytes_out``."""
        with self._lock:
            return {
                "requests": dict(self._requests),
                "errors": dict(self._errors),
                "bytes_in": self._bytes_in,
                "bytes_out": self._bytes_out,
            }
