"""A port that a training will listen on: proof that it is free, a promise to one job, and who has it when it is not.

Binding alone promises nothing, since two sockets that do not listen may share a port. The promise is a name in the
kernel's abstract socket namespace, which has exactly the reach of a port: one network namespace, whoever the user is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import Iterator, List, Set


class PortPromise:
    """One port, bound and promised to the caller.

    Raises:
        OSError: it cannot be had; the message names the port and, where ``/proc`` tells, who has it.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._sockets: List[socket.socket] = []
        name = _name_of(port)
        self._promise = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._promise.bind("\0" + name)
            for bound in _bind(port):
                self._sockets.append(bound)
        except OSError as error:
            self.give_back()
            taken = error.errno == errno.EADDRINUSE
            why = "is taken" + _by_whom(port) if taken else f"cannot be used: {error.strerror}"
            raise OSError(f"port {port} {why}") from None

    def let_bind(self) -> None:
        """Leave the port itself to the training; it stays promised."""
        while self._sockets:
            self._sockets.pop().close()

    def give_back(self) -> None:
        """End the promise too."""
        self.let_bind()
        self._promise.close()


def _name_of(port: int) -> str:
    return f"swift-trainer/port-{port}"


def _bind(port: int) -> Iterator[socket.socket]:
    """Sockets bound to the port on all addresses; none of them listens, so that nobody takes it for the training."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 - all are meant
        try:
            bound = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # a kernel without IPv6
            continue
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind((address, port))
        except OSError as error:
            bound.close()
            if error.errno == errno.EADDRNOTAVAIL:  # IPv6 is switched off
                continue
            raise
        yield bound


def _by_whom(port: int) -> str:
    """Words for the process that has a port, as far as this user may see."""
    inodes = _inodes(port)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) != os.getpid() and inodes & _sockets_of(pid):
            return f" by pid {pid} ({_command_of(pid)})"
    return ""


def _inodes(port: int) -> Set[str]:
    """The socket inodes that listen on the port, that use it, or that it is promised to."""
    found = {
        fields[9] for fields in _rows("/proc/net/tcp") + _rows("/proc/net/tcp6") if fields[1].endswith(f":{port:04X}")
    }
    return found | {fields[6] for fields in _rows("/proc/net/unix") if fields[7:] == [f"@{_name_of(port)}"]}


def _rows(path: str) -> List[List[str]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return [line.split() for line in stream][1:]
    except OSError:
        return []


def _sockets_of(pid: str) -> Set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{descriptor}").partition(":[")
                if kind == "socket":
                    found.add(inode.rstrip("]"))
    return found


def _command_of(pid: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as stream:
        return stream.read(500).replace(b"\0", b" ").decode("utf-8", "replace").strip()[:200] or "?"
    return "?"
