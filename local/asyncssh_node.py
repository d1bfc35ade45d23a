"""An SSH server for machines without sshd: ``python -m local.asyncssh_node ADDRESS PORT FOLDER``.

Runs commands and SFTP as the user who started it; the only login is the key in ``FOLDER/authorized_keys``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import asyncssh


async def handle(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Runs the client's command with the user's shell, wired to the channel."""
    shell = os.environ.get("SHELL", "/bin/sh")
    command = [shell, "-c", process.command] if process.command else [shell, "-l"]
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    await process.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
    status = await child.wait()
    await process.stdout.drain()
    process.exit(status if status >= 0 else 128 - status)


async def serve(address: str, port: int, folder: Path) -> None:
    """Listens until it is killed."""
    server = await asyncssh.listen(
        address,
        port,
        server_host_keys=[str(folder / "host_key")],
        authorized_client_keys=str(folder / "authorized_keys"),
        process_factory=handle,
        encoding=None,
        sftp_factory=True,
        allow_scp=False,
    )
    await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
