"""The keys of a bucket for the command line: from the environment, or from Airflow's own command."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from swift_provider.config import ConfigError, Fault
from swift_provider.config.bucket import target_of
from swift_provider.config.checkpoints import Storage
from trainer.protocol import OssTarget

#: What Alibaba's own tools read, and the connection's fields that they stand for.
VARIABLES = {
    "OSS_ACCESS_KEY_ID": "access_key_id",
    "OSS_ACCESS_KEY_SECRET": "access_key_secret",
    "OSS_SESSION_TOKEN": "security_token",
    "OSS_REGION": "region",
    "OSS_ENDPOINT": "endpoint",
}
_PATIENCE_S = 120.0  # Airflow's command takes seconds to start


def target_for(location: str, conn_id: str, storage: Storage | None = None) -> OssTarget:
    """The place, with the keys of the first of: the variable ``AIRFLOW_CONN_<ID>``, the variables ``OSS_…``, and
    ``airflow connections get``, which also asks Airflow's database and secrets backends.

    Raises:
        ConfigError: there are no keys, or the location is none.
    """
    variable = f"AIRFLOW_CONN_{conn_id.upper()}"
    if os.environ.get(variable):
        name, fields = variable, parse_connection(os.environ[variable])
    elif os.environ.get("OSS_ACCESS_KEY_ID"):
        name = "the environment"
        fields = {"extra": {key: os.environ[var] for var, key in VARIABLES.items() if os.environ.get(var)}}
    else:
        name, fields = f"connection {conn_id!r}", _ask_airflow(conn_id)
    try:
        return target_of(
            location,
            name,
            fields.get("extra") or {},
            login=fields.get("login") or None,
            password=fields.get("password") or None,
            host=fields.get("host") or None,
            storage=storage,
        )
    except ValueError as error:
        raise ConfigError([Fault(location, "", str(error))]) from None


def parse_connection(text: str) -> dict[str, Any]:
    """The fields of a connection in JSON, or as Airflow's URI ``oss://login:password@host/?extra=…``."""
    if text.lstrip().startswith("{"):
        try:
            fields: dict[str, Any] = json.loads(text)
        except ValueError:
            return {}
        return {**fields, "extra": _extra(fields.get("extra"))}
    parts = urlsplit(text)
    query = dict(parse_qsl(parts.query))
    extra = _extra(query["__extra__"]) if "__extra__" in query else query
    return {
        "login": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "host": unquote(parts.hostname or ""),
        "extra": extra,
    }


def _extra(value: Any) -> dict[str, Any]:
    """Extra as a mapping, whichever way it was written down."""
    if isinstance(value, Mapping):
        return dict(value)
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(str(value or "{}"))
        except (ValueError, SyntaxError):
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _ask_airflow(conn_id: str) -> dict[str, Any]:
    command = shutil.which("airflow")
    how = f"set AIRFLOW_CONN_{conn_id.upper()}, or OSS_ACCESS_KEY_ID, OSS_ACCESS_KEY_SECRET and OSS_REGION"
    if command is None:
        raise ConfigError([Fault(conn_id, "", f"no keys for the bucket: there is no airflow command here; {how}")])
    done = subprocess.run(
        [command, "connections", "get", conn_id, "--output", "json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE_S,
    )
    try:
        [fields] = json.loads(done.stdout)
    except ValueError:
        # What the command wrote may hold a secret; it is not repeated.
        raise ConfigError([Fault(conn_id, "", f"Airflow knows no such connection; add it, or {how}")]) from None
    return {**fields, "extra": _extra(fields.get("extra_dejson"))}
