"""One held SSH connection to a node, and the agent's verbs over it. Knows nothing of Airflow."""

from __future__ import annotations

import asyncio
import posixpath
import secrets
import shlex
from typing import Any, TypeVar, cast

import asyncssh

from swift_provider.exceptions import AgentFailed, NodeUnreachable
from swift_provider.hooks.endpoint import SshEndpoint
from swift_provider.hooks.login import Logins
from trainer import protocol
from trainer.bundle import agent_bundle

R = TypeVar("R")

DEFAULT_CALL_TIMEOUT_S = 120.0


class NodeSession:
    """A node: connect, call a verb, read bytes of a file, close. Reconnects by itself when a call finds it closed."""

    def __init__(
        self, name: str, endpoint: SshEndpoint, workdir: str, python: str, logins: Logins | None = None
    ) -> None:
        self.name, self.endpoint, self.workdir, self.python = name, endpoint, workdir, python
        self._logins = logins or Logins(1)
        self._connection: asyncssh.SSHClientConnection | None = None
        self._sftp: asyncssh.SFTPClient | None = None
        self._agent: str | None = None
        self._lock = asyncio.Lock()

    async def connect(self) -> asyncssh.SSHClientConnection:
        """The open connection, made now if there is none.

        Raises:
            HostKeyUnknown: the node's host key is not known, or is another one than the known.
            NodeUnreachable: anything else that keeps us from logging in.
        """
        async with self._lock:
            if self._connection is None or self._connection.is_closed():
                self._sftp = None
                self._connection = await self._logins.log_in(self.name, self.endpoint)
            return self._connection

    async def sftp(self) -> asyncssh.SFTPClient:
        """The open SFTP channel of the connection.

        Raises:
            AgentFailed: the node's sshd has no SFTP subsystem.
            NodeUnreachable: the connection could not be made or was lost.
        """
        connection = await self.connect()
        if self._sftp is None:
            try:
                self._sftp = await connection.start_sftp_client()
            except asyncssh.ChannelOpenError as error:
                reason = f"the node offers no SFTP ({error.reason}); enable the sftp subsystem of its sshd"
                raise AgentFailed(f"{self.name}: {reason}") from None
            except (OSError, asyncssh.Error) as error:
                raise NodeUnreachable(f"{self.name}: the connection was lost ({error})") from None
        return self._sftp

    async def call(
        self, verb: str, request: Any, reply_type: type[R], timeout: float | None = DEFAULT_CALL_TIMEOUT_S
    ) -> R:
        """One verb of the agent: ships the agent if this node does not have it, sends the request, reads the reply.

        Args:
            verb: as in :mod:`trainer.protocol`.
            request: the verb's request dataclass; may hold secrets, travels on stdin only.
            reply_type: the verb's reply dataclass.
            timeout: seconds that the verb may take; ``None`` = no limit.

        Raises:
            AgentFailed: the agent ended without an answer.
            NodeUnreachable: the connection could not be made or was lost; the verb may or may not have run.
        """
        command = [self.python, "-I", await self._ship_agent(), verb]
        done = await self._run(command, protocol.dumps(request).encode(), timeout)
        stdout, stderr = cast(bytes, done.stdout or b""), cast(bytes, done.stderr or b"")
        if done.exit_status is None and done.exit_signal is None:
            raise NodeUnreachable(f"{self.name}: the connection was lost during {verb}")
        if done.exit_status != 0:
            raise AgentFailed(f"{self.name}: {verb}: {self._last_words(done.exit_status, stderr)}")
        reply = next((line for line in reversed(stdout.splitlines()) if line.startswith(b"{")), b"")
        try:
            return protocol.loads(reply_type, reply.decode())
        except ValueError as error:
            raise AgentFailed(f"{self.name}: {verb}: unreadable reply: {error}") from None

    async def _run(self, command: list[str], data: bytes, timeout: float | None) -> asyncssh.SSHCompletedProcess:
        connection = await self.connect()
        try:
            return await connection.run(shlex.join(command), input=data, encoding=None, timeout=timeout)
        except asyncssh.TimeoutError:
            raise AgentFailed(f"{self.name}: {command[-1]}: no answer within {timeout:g} s") from None
        except (OSError, asyncssh.Error) as error:
            raise NodeUnreachable(f"{self.name}: the connection was lost ({error})") from None

    def _last_words(self, status: int | None, stderr: bytes) -> str:
        lines = stderr.decode("utf-8", "replace").strip().splitlines()
        if status in (126, 127):
            return f"{self.python} does not run on this node; set `python` in the cluster file to the interpreter there"
        return lines[-1] if lines else f"exit status {status} without a message"

    async def _ship_agent(self) -> str:
        if self._agent is None:
            content_hash, content = agent_bundle()
            path = posixpath.join(self.workdir, "agent", f"{content_hash}.pyz")
            await self.put(path, content)
            self._agent = path
        return self._agent

    async def put(self, path: str, content: bytes) -> None:
        """Writes ``content`` to ``path`` unless a file of that size is there: temporary name, then rename.

        Meant for files that are named by their content.
        """
        sftp = await self.sftp()
        try:
            if await sftp.exists(path) and (await sftp.stat(path)).size == len(content):
                return
            await sftp.makedirs(posixpath.dirname(path), attrs=asyncssh.SFTPAttrs(permissions=0o700), exist_ok=True)
            temporary = f"{path}.{secrets.token_hex(4)}.tmp"
            async with sftp.open(temporary, "wb", asyncssh.SFTPAttrs(permissions=0o600)) as file:
                await file.write(content)
            await sftp.posix_rename(temporary, path)
        except asyncssh.SFTPError as error:
            raise AgentFailed(
                f"{self.name}: cannot write {path}: {error.reason}; check the cluster's workdir"
            ) from None
        except (OSError, asyncssh.Error) as error:
            raise NodeUnreachable(f"{self.name}: the connection was lost ({error})") from None

    async def touch(self, path: str) -> None:
        """Makes an empty file; the folder must be there.

        Raises:
            AgentFailed: the node refuses.
            NodeUnreachable: the connection could not be made or was lost.
        """
        sftp = await self.sftp()
        try:
            async with sftp.open(path, "ab", asyncssh.SFTPAttrs(permissions=0o600)):
                pass
        except asyncssh.SFTPError as error:
            raise AgentFailed(f"{self.name}: cannot write {path}: {error.reason}") from None
        except (OSError, asyncssh.Error) as error:
            raise NodeUnreachable(f"{self.name}: the connection was lost ({error})") from None

    async def read(self, path: str, offset: int = 0, size: int = -1) -> bytes | None:
        """Bytes of a file from ``offset`` on, at most ``size`` of them; ``None`` if there is no such file.

        Raises:
            NodeUnreachable: the connection could not be made or was lost.
        """
        sftp = await self.sftp()
        try:
            async with sftp.open(path, "rb") as file:
                # asyncssh reads blocks in parallel. When one meets the end of a file that grows and the next one no
                # longer does, zeros come in its place: never ask for more than is there.
                there = max(0, ((await file.stat()).size or 0) - offset)
                return cast(bytes, await file.read(there if size < 0 else min(size, there), offset)) if there else b""
        except asyncssh.SFTPNoSuchFile:
            return None
        except asyncssh.SFTPError as error:
            self._sftp = None
            raise NodeUnreachable(f"{self.name}: cannot read {path}: {error.reason}") from None
        except (OSError, asyncssh.Error) as error:
            raise NodeUnreachable(f"{self.name}: the connection was lost ({error})") from None

    async def close(self) -> None:
        """Closes the connection; what runs on the node goes on."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
            self._sftp = None
