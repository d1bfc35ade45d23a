"""Logging in to a node, through a jump host where there is one, and saying what to do when that fails."""

from __future__ import annotations

import asyncio

import asyncssh
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from swift_provider.exceptions import HostKeyUnknown, NodeUnreachable
from swift_provider.hooks.endpoint import SshEndpoint

#: sshd drops logins at random beyond MaxStartups (10:30:100 by default); a few tries with jitter get through.
LOGIN_ATTEMPTS = 4


class Logins:
    """The logins of one group of nodes: bounded in number, and one connection to each jump host for all behind it.

    Args:
        parallel: logins at the same time.
    """

    def __init__(self, parallel: int) -> None:
        self._turns = asyncio.Semaphore(parallel)
        self._jumps: dict[tuple[str, int], asyncssh.SSHClientConnection] = {}
        self._lock = asyncio.Lock()

    async def log_in(self, name: str, endpoint: SshEndpoint) -> asyncssh.SSHClientConnection:
        """A new connection to the node ``name``.

        Raises:
            HostKeyUnknown: a host key is not known, or is another one than the known.
            NodeUnreachable: anything else that keeps us from logging in.
        """
        tunnel = await self._jump(name, endpoint.jump) if endpoint.jump is not None else None
        return await self._connect(name, endpoint, tunnel)

    async def _jump(self, name: str, jump: SshEndpoint) -> asyncssh.SSHClientConnection:
        key = jump.host, jump.port
        async with self._lock:
            connection = self._jumps.get(key)
            if connection is None or connection.is_closed():
                connection = self._jumps[key] = await self._connect(f"{name}: jump host", jump, None)
            return connection

    async def _connect(
        self, name: str, endpoint: SshEndpoint, tunnel: asyncssh.SSHClientConnection | None
    ) -> asyncssh.SSHClientConnection:
        where = f"{name} ({endpoint.host}:{endpoint.port})"
        # What sshd drops under load is worth another try at once; a host that stays silent is not: it costs a timeout.
        transient = retry_if_exception_type((asyncssh.ConnectionLost, ConnectionResetError))
        options = endpoint.options | ({"tunnel": tunnel} if tunnel is not None else {})
        try:
            async for attempt in AsyncRetrying(
                retry=transient,
                stop=stop_after_attempt(LOGIN_ATTEMPTS),
                wait=wait_random_exponential(multiplier=0.5, max=5),
                reraise=True,
            ):
                with attempt:
                    async with self._turns:
                        return await asyncssh.connect(endpoint.host, endpoint.port, **options)
        except asyncssh.HostKeyNotVerifiable as error:
            raise HostKeyUnknown(
                f"{where}: host key not verified ({error.reason}). Read the key on a network that you trust with "
                f"`ssh-keyscan -t ed25519 -p {endpoint.port} {endpoint.host}` and put it into the Extra of "
                f'connection {endpoint.conn_id!r} as {{"{endpoint.key_extra}": "ssh-ed25519 AAAA…"}}.'
            ) from None
        except asyncssh.PermissionDenied as error:
            raise NodeUnreachable(
                f"{where}: login refused ({error.reason}); check login, key_file and password of connection "
                f"{endpoint.conn_id!r}, and the node's authorized_keys"
            ) from None
        except (OSError, asyncssh.Error, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise NodeUnreachable(
                f"{where}: no SSH connection ({reason}); is the node up and the port right?"
            ) from None
        raise NodeUnreachable(f"{where}: no SSH connection")  # not reached: the loop returns or raises

    def close(self) -> None:
        """Closes the connections to jump hosts, and with them all that goes through."""
        for connection in self._jumps.values():
            connection.abort()
        self._jumps.clear()
