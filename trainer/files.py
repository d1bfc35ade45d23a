"""Files that survive a crash, and locks that the kernel frees: the few file operations everything else rests on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from typing import Iterator, Optional

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700


def write_atomic(path: str, data: bytes, sync: bool = False) -> None:
    """Replace ``path`` by ``data`` in one step: a reader sees the old or the new content, never a part.

    With ``sync`` the content and the name are on the disk when this returns (a few milliseconds to many).

    Raises:
        OSError: the disk is full, the folder is missing or not writable; ``path`` is then unchanged.
    """
    temporary = f"{path}.{os.getpid()}-{threading.get_ident()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        remove_quietly(temporary)
        raise
    if sync:
        sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    """Make renames inside the folder ``path`` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: str, data: bytes) -> None:
    """Add ``data`` to the end of ``path``, in one write: threads and a kill in between do not mix lines."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def size_or_zero(path: str) -> int:
    """The size of a file in bytes; 0 where it cannot be told."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def read_bytes(path: str) -> Optional[bytes]:
    """The content of ``path``, or ``None`` when there is no such file."""
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def remove_quietly(path: str) -> None:
    """Remove a file; it is fine when it is not there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def open_lock(path: str) -> int:
    """An open descriptor of the lock file ``path``, which is made when missing; not locked yet."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)


def try_lock(descriptor: int, shared: bool = False) -> bool:
    """Take the lock of an open file description at once, exclusive or shared, or answer ``False``."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: str) -> bool:
    """Whether some process holds the exclusive flock of ``path``. Shares the lock for an instant to know."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: str, timeout_s: float = 60.0) -> Iterator[int]:
    """Hold the exclusive flock of ``path`` for the length of the block, or for as long as a process keeps the answer.

    Raises:
        TimeoutError: another process held it for ``timeout_s`` seconds.
    """
    descriptor = open_lock(path)
    try:
        deadline = time.monotonic() + timeout_s
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} is locked by another process for more than {timeout_s:g} s")
            time.sleep(0.02)
        yield descriptor
    finally:
        os.close(descriptor)
