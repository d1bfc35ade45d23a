"""Starts and ends the servers of the laptop: each in a process group of its own, killed by pid and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path


def free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host`` that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def wait_for_port(host: str, port: int, timeout: float, process: subprocess.Popen[bytes] | None = None) -> None:
    """Returns when somebody listens on ``host``:``port``.

    Raises:
        TimeoutError: nobody does within ``timeout`` seconds.
        RuntimeError: ``process`` has ended before.
    """
    limit = time.monotonic() + timeout
    while time.monotonic() < limit:
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with status {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nobody listens on {host}:{port} after {timeout:g} s")


def spawn(
    command: list[str], log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """A server in a session of its own, so that Ctrl-C reaches us alone; output goes to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(env) if env is not None else None,
            cwd=cwd,
        )


def end(process: subprocess.Popen[bytes], grace: float = 10.0) -> None:
    """TERM to the process's group, then KILL to what is left of it after ``grace`` seconds."""
    end_group(process.pid, grace)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def end_group(group: int, grace: float = 10.0) -> None:
    """The same for a group that another process of ours started; a group that is gone is fine."""
    limit = time.monotonic() + grace
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < limit:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(group, os.WNOHANG)  # a zombie would count as a living group
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)


def descendants_marked(name: str, value_prefix: str) -> Iterator[int]:
    """Processes whose environment has ``name`` with a value that begins with ``value_prefix``."""
    wanted = f"{name}={value_prefix}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if any(item.startswith(wanted) for item in (entry / "environ").read_bytes().split(b"\0")):
                    yield int(entry.name)
