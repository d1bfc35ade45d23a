"""What the tests share: the keys the server knows, and an oss2 bucket signed with one of them."""

import time
import uuid
from collections.abc import Callable

import oss2

from local.oss_server import RunningServer

KEY_ID = "LTAItest"
SECRET = "correct-horse-battery-staple"
REGION = "cn-hangzhou"
ADMIN_TOKEN = "open-sesame"
PART = 100 * 1024  # bytes, the smallest part that need not be the last


def auth(version: str, secret: str = SECRET) -> oss2.Auth | oss2.AuthV4:
    return oss2.AuthV4(KEY_ID, secret) if version == "v4" else oss2.Auth(KEY_ID, secret)


def connect(server: RunningServer, name: str, version: str = "v4", secret: str = SECRET) -> oss2.Bucket:
    """Return an oss2 bucket that keeps its own connections."""
    return oss2.Bucket(auth(version, secret), server.endpoint, name, region=REGION)


def new_bucket(server: RunningServer, version: str = "v4") -> oss2.Bucket:
    """Make a bucket of a fresh name."""
    bucket = connect(server, f"t-{uuid.uuid4().hex[:16]}", version)
    bucket.create_bucket()
    return bucket


def pattern(size: int, seed: int = 0) -> bytes:
    """Return bytes that differ everywhere enough to show a misplaced piece."""
    block = b"".join((seed + i).to_bytes(8, "big") for i in range(4096))
    return (block * (size // len(block) + 1))[:size]


def counting(server: RunningServer, operation: str) -> Callable[[], int]:
    """Return a function that says how many requests of that operation began since now."""
    mine = server.inject(kind="status", operation=operation, skip=10**9)

    def seen() -> int:
        return next(int(str(fault["seen"])) for fault in server.faults.state() if fault["id"] == mine)

    return seen


def wait_until(holds: Callable[[], bool], seconds: float = 5) -> None:
    """Wait for something that another thread is about to bring about."""
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, "it did not come about in time"
        time.sleep(0.02)
