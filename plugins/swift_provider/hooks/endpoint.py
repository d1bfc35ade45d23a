"""An ordinary Airflow ``ssh`` connection as options for asyncssh. Host keys are verified unless it says otherwise."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import asyncssh

if TYPE_CHECKING:
    from airflow.sdk import Connection

DEFAULT_CONNECT_TIMEOUT_S = 15.0
#: A cut cable is noticed after KEEPALIVE_S * KEEPALIVE_COUNT seconds; without keepalive, never.
KEEPALIVE_S = 5
KEEPALIVE_COUNT = 3


@dataclass(frozen=True)
class SshEndpoint:
    """Where and how to log in.

    Args:
        conn_id: of the Airflow connection.
        host: name or address.
        port: of its sshd.
        options: keyword arguments of :func:`asyncssh.connect`; the repr hides them.
        jump: the host that the way there leads through.
        key_extra: the connection's extra that holds the public host key.
    """

    conn_id: str
    host: str
    port: int
    options: dict[str, Any] = field(repr=False)
    jump: SshEndpoint | None = None
    key_extra: str = "host_key"

    @property
    def verifies_host_key(self) -> bool:
        """Whether a server with another key than the known one is refused."""
        return self.options["known_hosts"] is not None


def endpoint_of(connection: Connection) -> SshEndpoint:
    """The endpoint that an Airflow connection describes.

    Understands the extras of Airflow's SSH provider (``key_file``, ``private_key``, ``private_key_passphrase``,
    ``host_key``, ``no_host_key_check``, ``conn_timeout``) plus ``known_hosts`` and, for nodes behind a jump host, the
    client's ``proxy_jump`` (``user@host:port``, its key as ``proxy_host_key`` or in known_hosts) and ``proxy_command``.

    Raises:
        ValueError: the connection has no host, or an extra is unusable.
    """
    extra = connection.extra_dejson
    if not connection.host:
        raise ValueError(f"connection {connection.conn_id!r} has no host")
    port = int(connection.port or 22)
    options: dict[str, Any] = {
        "username": connection.login or (),
        "known_hosts": _known_hosts(extra, "host_key", connection.host, port, str(connection.conn_id)),
        "connect_timeout": float(extra.get("conn_timeout") or DEFAULT_CONNECT_TIMEOUT_S),
        "login_timeout": float(extra.get("auth_timeout") or 2 * DEFAULT_CONNECT_TIMEOUT_S),
        "keepalive_interval": KEEPALIVE_S,
        "keepalive_count_max": KEEPALIVE_COUNT,
    }
    if not options["username"]:
        del options["username"]
    passphrase = extra.get("private_key_passphrase") or extra.get("passphrase")
    if extra.get("private_key"):
        options["client_keys"] = [asyncssh.import_private_key(extra["private_key"], passphrase)]
    elif extra.get("key_file"):
        options["client_keys"] = [extra["key_file"]]
        if passphrase:
            options["passphrase"] = passphrase
    if connection.password:
        options["password"] = connection.password
    if extra.get("proxy_command"):
        values = {"%h": connection.host, "%p": str(port), "%r": connection.login or ""}
        options["proxy_command"] = [_fill(word, values) for word in shlex.split(str(extra["proxy_command"]))]
    jump = _jump(connection, extra, options) if extra.get("proxy_jump") else None
    return SshEndpoint(conn_id=str(connection.conn_id), host=connection.host, port=port, options=options, jump=jump)


def _fill(word: str, values: Mapping[str, str]) -> str:
    for token, value in values.items():
        word = word.replace(token, value)
    return word


def _jump(connection: Connection, extra: dict[str, Any], options: dict[str, Any]) -> SshEndpoint:
    """The jump host, with the node's own keys, password and timeouts."""
    text = str(extra["proxy_jump"])
    match = re.fullmatch(r"(?:(?P<user>[^@\s]+)@)?(?P<host>\[[^\]]+\]|[^@:\s,]+)(?::(?P<port>\d{1,5}))?", text)
    if match is None:
        raise ValueError(
            f"connection {connection.conn_id!r}: extra proxy_jump {text!r} is not user@host:port; for several jumps "
            "in a row use proxy_command"
        )
    host, port = match["host"].strip("[]"), int(match["port"] or 22)
    known = _known_hosts(extra, "proxy_host_key", host, port, str(connection.conn_id))
    own = {name: value for name, value in options.items() if name != "proxy_command"} | {"known_hosts": known}
    if match["user"]:
        own["username"] = match["user"]
    return SshEndpoint(str(connection.conn_id), host, port, own, key_extra="proxy_host_key")


def _known_hosts(extra: dict[str, Any], key_extra: str, host: str, port: int, conn_id: str) -> Any:
    if str(extra.get("no_host_key_check", "false")).lower() == "true":
        return None
    if extra.get(key_extra):
        given = str(extra[key_extra])
        key = " ".join(given.split()[-2:]) if " " in given else given
        if " " not in key:
            key = f"ssh-rsa {key}"  # the SSH provider's meaning of a bare key
        name = host if port == 22 else f"[{host}]:{port}"
        try:
            return asyncssh.import_known_hosts(f"{name} {key}\n")
        except ValueError as error:
            raise ValueError(f"connection {conn_id!r}: extra {key_extra} is not a public key: {error}") from None
    return extra.get("known_hosts") or ()
