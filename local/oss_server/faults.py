"""Faults on request: which requests go wrong, how, and how often."""

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from local.oss_server.auth import MAX_SKEW, too_skewed
from local.oss_server.errors import OssError
from local.oss_server.request import OssRequest


class Kind(StrEnum):
    """What goes wrong."""

    STATUS = "status"  # an error reply: status, code
    THROTTLE = "throttle"  # 503 with x-oss-qos-delay-time: delay_ms
    EXPIRED_TOKEN = "expired_token"  # noqa: S105 - SecurityTokenExpired
    SKEW = "skew"  # RequestTimeTooSkewed
    RESET = "reset"  # the connection is reset after after_bytes of a body
    SLOW = "slow"  # bodies move at bytes_per_second, both ways
    LOST_REPLY = "lost_reply"  # done, and then the connection is reset instead of a reply
    WRONG_CRC = "wrong_crc"  # x-oss-hash-crc64ecma is wrong


class Direction(StrEnum):
    """Which body ``reset`` counts."""

    RECEIVED = "received"  # what the client sends
    SENT = "sent"  # what the client gets


@dataclass(frozen=True)
class Fault:
    """One fault. Empty match fields match everything.

    Attributes:
        kind: what goes wrong.
        method: HTTP method to match.
        bucket: glob on the bucket.
        key: glob on the key; ``*`` matches slashes too.
        operation: operation name, such as ``upload_part``.
        skip: how many matching requests pass unharmed first.
        times: how many then go wrong; None for all.
        status: HTTP status of ``status``.
        code: OSS error code of ``status`` and ``throttle``; a usual one when empty.
        after_bytes: for ``reset``, bytes of the body that still pass. A shorter body is cut before its end.
        direction: for ``reset``; by default what PUT and POST send, and what others get.
        bytes_per_second: for ``slow``.
        delay_ms: for ``throttle``, the wait the server asks for.
    """

    kind: Kind
    method: str = ""
    bucket: str = ""
    key: str = ""
    operation: str = ""
    skip: int = 0
    times: int | None = 1
    status: int = 500
    code: str = ""
    after_bytes: int = 0
    direction: Direction | None = None
    bytes_per_second: int = 1 << 20
    delay_ms: int = 100

    @classmethod
    def from_json(cls, document: object) -> "Fault":
        """Read a fault from the JSON of ``POST /_faults``.

        Raises:
            ValueError: naming the field that is unknown or has a wrong value.
        """
        if not isinstance(document, Mapping):
            raise ValueError("a fault is a JSON object")
        unknown = set(document) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown fields: {', '.join(sorted(map(str, unknown)))}")
        if "kind" not in document:
            raise ValueError("kind is missing")
        values: dict[str, Any] = {name: _checked(name, value) for name, value in document.items()}
        return cls(**values)

    def matches(self, request: OssRequest, operation: str) -> bool:
        """Return whether a request is one that this fault is about."""
        return (
            self.method.upper() in ("", request.method)
            and self.operation in ("", operation)
            and fnmatchcase(request.bucket, self.bucket or "*")
            and fnmatchcase(request.key, self.key or "*")
        )

    def cut_direction(self, method: str) -> Direction:
        """Return which body a ``reset`` counts for a request of that method."""
        return self.direction or (Direction.RECEIVED if method in ("PUT", "POST") else Direction.SENT)

    def error(self) -> OssError | None:
        """Return the error that is answered instead of doing anything, if this kind is one."""
        if self.kind is Kind.STATUS:
            code = self.code or ("ServiceUnavailable" if self.status == 503 else "InternalError")
            return OssError(code, status=self.status)
        if self.kind is Kind.THROTTLE:
            headers = {"x-oss-qos-delay-time": str(self.delay_ms)}
            return OssError(self.code or "TotalQpsLimitExceeded", status=503, headers=headers)
        if self.kind is Kind.EXPIRED_TOKEN:
            return OssError("SecurityTokenExpired")
        if self.kind is Kind.SKEW:
            now = time.time()
            return too_skewed(now - 2 * MAX_SKEW, now)
        return None


def _checked(name: str, value: object) -> object:
    if name == "kind":
        return Kind(str(value))
    if name == "direction":
        return None if value is None else Direction(str(value))
    if name in ("method", "bucket", "key", "operation", "code"):
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a string")
        return value
    return _checked_number(name, value)


def _checked_number(name: str, value: object) -> int | None:
    if value is None and name == "times":
        return None
    least, most = {"status": (400, 599), "bytes_per_second": (1, 1 << 40)}.get(name, (0, 1 << 40))
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number between {least} and {most}")
    return value


@dataclass
class _Posted:
    id: int
    fault: Fault
    seen: int = 0
    hits: int = 0


class FaultBoard:
    """The faults in force. The first posted that matches a request and is not used up is the one that happens."""

    def __init__(self) -> None:
        self._posted: list[_Posted] = []
        self._ids = itertools.count(1)
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> int:
        """Put a fault in force and return its id."""
        with self._lock:
            posted = _Posted(next(self._ids), fault)
            self._posted.append(posted)
            return posted.id

    def clear(self) -> None:
        """Take back all faults."""
        with self._lock:
            self._posted.clear()

    def take(self, request: OssRequest, operation: str) -> Fault | None:
        """Return the fault that a request meets, and count it."""
        with self._lock:
            for posted in self._posted:
                if _strikes(posted, request, operation):
                    return posted.fault
        return None

    def state(self) -> list[dict[str, object]]:
        """Return every fault with its ``id``, ``seen`` (matching requests) and ``hits`` (those that went wrong)."""
        with self._lock:
            return [
                {"id": posted.id, **asdict(posted.fault), "seen": posted.seen, "hits": posted.hits}
                for posted in self._posted
            ]


def _strikes(posted: _Posted, request: OssRequest, operation: str) -> bool:
    fault = posted.fault
    used_up = fault.times is not None and posted.hits >= fault.times
    if used_up or not fault.matches(request, operation):
        return False
    posted.seen += 1
    if posted.seen <= fault.skip:
        return False
    posted.hits += 1
    return True
