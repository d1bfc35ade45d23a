"""Starting a process that outlives the SSH session: own session, no inherited descriptors, adopted by init."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from typing import Collection, Dict, List, NoReturn, Sequence

from trainer.files import PRIVATE_FILE
from trainer.protocol import MARKER


def agent_command(*arguments: str) -> List[str]:
    """The command that runs this very agent again, from its zipapp or from a source folder."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.isfile(root):  # trainer.pyz/trainer/detach.py
        return [sys.executable, "-I", root, *arguments]
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from trainer.cli import main; sys.exit(main())"
    return [sys.executable, "-I", "-c", code, root, *arguments]


def agent_environment() -> Dict[str, str]:
    """The environment for a supervisor: this one, without what belongs to the SSH session or to another job."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SSH_") and name != MARKER}


def spawn_detached(
    command: Sequence[str], environment: Dict[str, str], stderr: str, keep: Collection[int], limit_s: int
) -> None:
    """Run ``command`` as a daemon with its output appended to the file ``stderr`` and only ``keep`` left open.

    The kernel ends it after ``limit_s`` seconds unless it calls ``signal.alarm(0)`` before. Returns when the daemon has
    been forked; whether its ``exec`` succeeded is told by the descriptors in ``keep``.
    """
    pid = os.fork()
    if pid == 0:
        _become_daemon(command, environment, stderr, keep, limit_s)
    os.waitpid(pid, 0)


def _become_daemon(
    command: Sequence[str], environment: Dict[str, str], stderr: str, keep: Collection[int], limit_s: int
) -> NoReturn:
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
        for descriptor in keep:
            os.set_inheritable(descriptor, True)
        signal.alarm(limit_s)
        os.execve(command[0], list(command), environment)  # noqa: S606 - a shell is what we avoid
    except BaseException as error:
        os.write(2, f"cannot start the supervisor: {error!r}\n".encode())
    finally:
        os._exit(70)


def read_all(descriptor: int, timeout_s: float) -> bytes:
    """Everything written to a pipe until its last writer closes it, or until ``timeout_s`` seconds have passed."""
    data = b""
    while select.select([descriptor], [], [], timeout_s)[0]:
        part = os.read(descriptor, 65536)
        if not part:
            break
        data += part
    return data
