"""The ``listen`` and ``reach`` verbs: prove that nodes reach each other on the port that the training will use."""

from __future__ import annotations

import contextlib
import socket
import time

from trainer.protocol import ListenReply, ListenRequest, ReachReply, ReachRequest

_ACK = b"\n"


def listen(request: ListenRequest) -> ListenReply:
    """Answer callers with the nonce until ``expect`` of them have read it or the time is over."""
    deadline = time.monotonic() + request.timeout_s
    try:
        server = _bind(request.port)
    except OSError as error:
        return ListenReply(error=f"cannot listen on port {request.port}: {error}")
    callers = 0
    with server:
        while callers < request.expect:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except socket.timeout:
                break
            with connection, contextlib.suppress(OSError):
                callers += _serve(connection, request.nonce, deadline)
    return ListenReply(callers)


def _bind(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _serve(connection: socket.socket, nonce: str, deadline: float) -> int:
    connection.settimeout(max(0.001, min(2.0, deadline - time.monotonic())))
    connection.sendall(nonce.encode() + b"\n")
    return int(connection.recv(1) == _ACK)


def reach(request: ReachRequest) -> ReachReply:
    """Connect and read the nonce; tries again until the time is over, since both sides start at once."""
    deadline = time.monotonic() + request.timeout_s
    error = "no time to try"
    while time.monotonic() < deadline:
        began = time.monotonic()
        try:
            _call(request, min(3.0, deadline - began))
        except (OSError, ValueError) as problem:
            error = f"{request.host}:{request.port}: {problem}"
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
        else:
            return ReachReply(round_trip_s=time.monotonic() - began)
    return ReachReply(error=error)


def _call(request: ReachRequest, timeout_s: float) -> None:
    with socket.create_connection((request.host, request.port), timeout=timeout_s) as connection:
        with connection.makefile("rb") as stream:
            answer = stream.readline(4096).decode("utf-8", "replace").rstrip("\n")
        if answer != request.nonce:
            raise ValueError("something else answers there" if answer else "the connection was closed at once")
        connection.sendall(_ACK)
