"""Loopback nodes for the benchmarks: sixteen addresses to an sshd, each with a work folder of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.airflow.home import HOME  # noqa: F401 - before anything here imports airflow

# ruff: isort: split
import asyncssh

from local.nodes import LocalNode, make_nodes
from local.processes import free_port
from tests.cluster.sites import Site, loopback_site

T = TypeVar("T")

#: Of one sshd; it takes no more.
ADDRESSES = 16


@dataclass
class ManyAddresses(LocalNode):
    """A node whose sshd listens for other nodes too; those share its folder and key, and are never started."""

    others: tuple[str, ...] = ()

    def _write_config(self) -> Path:
        config = super()._write_config()
        lines = [f"ListenAddress {address}:{self.port}" for address in self.others]
        text = config.read_text().replace("MaxStartups 100:30:400", "MaxStartups 1000:30:2000")
        config.write_text("\n".join([*lines, text]))
        return config


@contextlib.contextmanager
def loopback(count: int, folder: Path | None = None) -> Iterator[Site]:
    """``count`` nodes on 127.0.0.11…, one sshd for sixteen of them."""
    logging.disable(logging.WARNING)
    with contextlib.ExitStack() as stack:
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="swift-bench-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(temporary))
        port = free_port("127.0.0.11")
        nodes = make_nodes(folder, count, port)
        for start in range(0, count, ADDRESSES):
            first, *others = nodes[start : start + ADDRESSES]
            addresses = tuple(node.address for node in others)
            server = ManyAddresses(first.name, first.address, port, first.folder, first.client_key, others=addresses)
            for node in others:
                node.folder = first.folder
            nodes[start] = server
            stack.callback(server.stop)
            server.start()
        yield stack.enter_context(loopback_site(nodes, folder / "site", free_port()))


def run_program(site: Site, program: str) -> None:
    """From now on the trainings of ``site`` are this Python text in ms-swift's place."""
    main = site.packages / "swift" / "cli" / "main.py"
    main.unlink()
    main.write_text(program)


async def connect(node: LocalNode) -> asyncssh.SSHClientConnection:
    """A plain asyncssh connection, with the same checks as ours."""
    known = asyncssh.import_known_hosts(f"[{node.address}]:{node.port} {node.host_key}\n")
    return await asyncssh.connect(
        node.address, node.port, username=node.user, client_keys=[str(node.client_key)], known_hosts=known
    )


def in_loop(work: Callable[[], Awaitable[T]]) -> T:
    """The coroutine that ``work`` makes, in a loop of its own."""

    async def body() -> T:
        return await work()

    return asyncio.run(body())


def cpu_seconds() -> float:
    """Processor time of this process so far, without its children's."""
    times = os.times()
    return times.user + times.system
