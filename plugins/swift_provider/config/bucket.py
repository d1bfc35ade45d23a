"""A connection to OSS as its fields say it: which endpoint, which keys, how objects are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_provider.config.checkpoints import Storage
from swift_provider.config.values import split_oss
from trainer.protocol import ObjectOptions, OssCredentials, OssTarget


def target_of(
    location: str,
    name: str,
    extra: Mapping[str, Any],
    *,
    login: str | None = None,
    password: str | None = None,
    host: str | None = None,
    storage: Storage | None = None,
) -> OssTarget:
    """Where ``oss://bucket/prefix`` is, how to sign for it, and how to store what is written.

    Args:
        location: the place.
        name: what to call the connection in messages.
        extra: its extra fields: those of Airflow's Alibaba provider (``auth_type``, ``access_key_id``,
            ``access_key_secret``, ``region``, ``endpoint``), ``security_token`` for temporary credentials, and
            ``internal`` for the region's internal endpoint.
        login: stands in for ``access_key_id``.
        password: stands in for ``access_key_secret``.
        host: stands in for ``endpoint``.
        storage: how new objects are stored; default: as the bucket says.

    Raises:
        ValueError: the location or the connection is incomplete; the message names the field.
    """
    bucket, prefix = split_oss(location)
    auth_type = extra.get("auth_type") or "AK"
    if auth_type not in ("AK", "STS"):
        raise ValueError(f"{name}: auth_type {auth_type!r} is not supported; use AK or STS")
    region = extra.get("region") or ""
    values = {
        "access_key_id": extra.get("access_key_id") or login,
        "access_key_secret": extra.get("access_key_secret") or password,
        "region": region,
    }
    missing = [field for field, value in values.items() if not value]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(missing)}; add to its Extra")
    return OssTarget(
        endpoint=_endpoint(name, extra, host, region),
        region=region,
        bucket=bucket,
        prefix=prefix.strip("/"),
        credentials=OssCredentials(
            access_key_id=str(values["access_key_id"]),
            access_key_secret=str(values["access_key_secret"]),
            security_token=extra.get("security_token") or None,
            auth_type="AK",
        ),
        options=options_of(storage or Storage()),
    )


def options_of(storage: Storage) -> ObjectOptions:
    """The recipe's ``checkpoints.storage`` as the nodes are told it."""
    return ObjectOptions(
        encryption=storage.encryption or "",
        kms_key_id=storage.kms_key_id or "",
        storage_class=storage.storage_class or "",
        tags=dict(storage.tags),
    )


def _endpoint(name: str, extra: Mapping[str, Any], host: str | None, region: str) -> str:
    internal = str(extra.get("internal") or "false").lower()
    if internal not in ("true", "false"):
        raise ValueError(f"{name}: internal must be true or false, is {extra['internal']!r}")
    given = extra.get("endpoint") or host
    if given and internal == "true":
        raise ValueError(f"{name}: endpoint and internal exclude each other; leave out one of the two")
    short = region.removeprefix("oss-")
    return str(given) if given else f"https://oss-{short}{'-internal' if internal == 'true' else ''}.aliyuncs.com"
