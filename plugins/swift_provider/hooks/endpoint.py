"""An ordinary Airflow ``ssh`` connection as options for asyncssh. Host keys are verified unless it says otherwise."""

from __future__ import annotations

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
    """Where and how to log in. ``options`` are keyword arguments of :func:`asyncssh.connect`; the repr hides them."""

    conn_id: str
    host: str
    port: int
    options: dict[str, Any] = field(repr=False)

    @property
    def verifies_host_key(self) -> bool:
        """Whether a server with another key than the known one is refused."""
        return self.options["known_hosts"] is not None


def endpoint_of(connection: Connection) -> SshEndpoint:
    """The endpoint that an Airflow connection describes.

    Understands the extras of Airflow's SSH provider (``key_file``, ``private_key``, ``private_key_passphrase``,
    ``host_key``, ``no_host_key_check``, ``conn_timeout``) plus ``known_hosts`` and, for nodes behind a jump host, the
    client's ``proxy_jump`` (``user@host:port``, its key in known_hosts) and ``proxy_command``.

    Raises:
        ValueError: the connection has no host, or an extra is unusable.
    """
    extra = connection.extra_dejson
    if not connection.host:
        raise ValueError(f"connection {connection.conn_id!r} has no host")
    port = int(connection.port or 22)
    options: dict[str, Any] = {
        "username": connection.login or (),
        "known_hosts": _known_hosts(extra, connection.host, port, str(connection.conn_id)),
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
        command = str(extra["proxy_command"])
        for token, value in (("%h", connection.host), ("%p", str(port)), ("%r", connection.login or "")):
            command = command.replace(token, value)
        options["proxy_command"] = command
    if extra.get("proxy_jump"):
        options["tunnel"] = extra["proxy_jump"]
    return SshEndpoint(conn_id=str(connection.conn_id), host=connection.host, port=port, options=options)


def _known_hosts(extra: dict[str, Any], host: str, port: int, conn_id: str) -> Any:
    if str(extra.get("no_host_key_check", "false")).lower() == "true":
        return None
    if extra.get("host_key"):
        key = " ".join(str(extra["host_key"]).split()[-2:]) if " " in str(extra["host_key"]) else str(extra["host_key"])
        if " " not in key:
            key = f"ssh-rsa {key}"  # the SSH provider's meaning of a bare key
        name = host if port == 22 else f"[{host}]:{port}"
        try:
            return asyncssh.import_known_hosts(f"{name} {key}\n")
        except ValueError as error:
            raise ValueError(f"connection {conn_id!r}: extra host_key is not a public key: {error}") from None
    return extra.get("known_hosts") or ()
