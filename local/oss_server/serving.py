"""Running the application: a loopback socket, uvicorn, and a connection that can be reset."""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from local.oss_server.app import create_app
from local.oss_server.auth import Credential
from local.oss_server.faults import Fault, FaultBoard
from local.oss_server.multipart import MIN_PART_SIZE
from local.oss_server.stats import Stats
from local.oss_server.wire import TRANSPORT_EXTENSION

_START_TIMEOUT = 20.0  # seconds
_STOP_TIMEOUT = 2  # seconds that requests under way are given


class _ResettableProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which also hands the application its transport, so that it can reset the connection."""

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        cast(dict[str, Any], self.scope)["extensions"] = {TRANSPORT_EXTENSION: self.transport}


def bind(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def endpoint_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server, which calls back once it accepts connections.

    Args:
        app: the application.
        on_ready: called without arguments when it listens.
    """

    def __init__(self, app: Starlette, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http=_ResettableProtocol,
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=_STOP_TIMEOUT,
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()


@dataclass(frozen=True)
class RunningServer:
    """A server in a thread of this process.

    Attributes:
        endpoint: such as ``http://127.0.0.1:40123``.
        faults: its faults; ``inject`` adds to them.
        stats: its counts.
    """

    endpoint: str
    faults: FaultBoard
    stats: Stats

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self.endpoint.rpartition(":")[2])

    def inject(self, **fault: object) -> int:
        """Put a fault in force, given by the fields of its JSON, and return its id.

        Raises:
            ValueError: as ``Fault.from_json``.
        """
        return self.faults.add(Fault.from_json(fault))


@contextmanager
def running_server(
    root: Path,
    credentials: Mapping[str, str | Credential],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    buckets: Iterable[str] = (),
    region: str = "cn-hangzhou",
    min_part_size: int = MIN_PART_SIZE,
    admin_token: str = "",
    clock: Callable[[], float] = time.time,
) -> Iterator[RunningServer]:
    """Run a server in a thread until the block ends. The other arguments are those of ``create_app``.

    Args:
        root: folder of everything kept.
        credentials: access key id to secret.
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        buckets: buckets to make if they are not there.
        region: that V4 signatures must name.
        min_part_size: bytes.
        admin_token: for ``/_faults`` and ``/_stats``.
        clock: Unix seconds.

    Raises:
        RuntimeError: if it does not listen within 20 seconds.
    """
    app = create_app(
        root,
        credentials,
        buckets=buckets,
        region=region,
        min_part_size=min_part_size,
        admin_token=admin_token,
        clock=clock,
    )
    ready = threading.Event()
    with bind(host, port) as listener:
        server = Server(app, ready.set)
        thread = threading.Thread(target=server.run, args=([listener],), name="oss-server", daemon=True)
        thread.start()
        try:
            if not ready.wait(_START_TIMEOUT):
                raise RuntimeError(f"the OSS server did not start within {_START_TIMEOUT:.0f} s")
            yield RunningServer(endpoint_of(listener), app.state.faults, app.state.stats)
        finally:
            server.should_exit = True
            thread.join(_STOP_TIMEOUT + 5)
