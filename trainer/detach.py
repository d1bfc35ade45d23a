"""Starting a process that outlives the SSH session: own session, no inherited descriptors, adopted by init."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from typing import Callable, Collection, NoReturn

from trainer.files import PRIVATE_FILE
from trainer.protocol import MARKER


def spawn_detached(body: Callable[[int], int], stderr: str, keep: Collection[int], limit_s: int) -> str:
    """Run ``body`` in a daemon with its output appended to the file ``stderr`` and only ``keep`` left open.

    The daemon is a fork of this process: a second start of Python would cost each node more processor time than all
    the rest of a start. The kernel ends it after ``limit_s`` seconds unless it calls ``signal.alarm(0)`` before.

    Args:
        body: gets a pipe, says there how it came up, closes it, and returns the exit status in the end.
        stderr: path of the daemon's log.
        keep: descriptors.
        limit_s: seconds that the daemon has to come up, and that its word is waited for.

    Returns:
        What the daemon said; ``""``: it said nothing.
    """
    reader, writer = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            _become_daemon(lambda: body(writer), stderr, (writer, *keep), limit_s)
        os.waitpid(pid, 0)
        os.close(writer)
        writer = -1
        return _read_all(reader, limit_s).decode("utf-8", "replace")
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def _become_daemon(body: Callable[[], int], stderr: str, keep: Collection[int], limit_s: int) -> NoReturn:
    status = 70
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        output = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
            if descriptor > 2 and descriptor not in keep:
                with contextlib.suppress(OSError):  # the listing's own descriptor is gone already
                    os.close(descriptor)
        for name in [name for name in os.environ if name.startswith("SSH_") or name == MARKER]:
            del os.environ[name]  # they belong to the SSH session, or to another job
        sys.stdout = sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(limit_s)
        status = body()
    except BaseException as error:
        os.write(2, f"the supervisor broke down: {error!r}\n".encode())
    finally:
        os._exit(status)


def _read_all(descriptor: int, timeout_s: float) -> bytes:
    """Everything written to a pipe until its last writer closes it, or until ``timeout_s`` seconds have passed."""
    data = b""
    while select.select([descriptor], [], [], timeout_s)[0]:
        part = os.read(descriptor, 65536)
        if not part:
            break
        data += part
    return data
