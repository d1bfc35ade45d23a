"""The bucket, through Airflow's ordinary ``oss`` connection, for ``oss2`` on this side and on the nodes."""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseHook

from swift_provider.config.values import split_oss
from trainer.protocol import OssCredentials, OssTarget


class OSSHook(BaseHook):
    """Turns a connection and a location into an :class:`~trainer.protocol.OssTarget`.

    The connection's Extra has the fields of Airflow's Alibaba provider (``auth_type``, ``access_key_id``,
    ``access_key_secret``, ``region``, ``endpoint``) plus ``security_token`` for temporary credentials; login and
    password may stand in for key id and secret.

    Args:
        oss_conn_id: Airflow connection of type ``oss``.
    """

    conn_name_attr = "oss_conn_id"
    default_conn_name = "oss_default"
    conn_type = "oss"
    hook_name = "Alibaba Cloud OSS"

    def __init__(self, oss_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.oss_conn_id = oss_conn_id

    def target(self, location: str) -> OssTarget:
        """Where ``oss://bucket/prefix`` is and how to sign for it.

        Raises:
            AirflowNotFoundException: the connection does not exist.
            ValueError: the location or the connection is incomplete; the message names the field.
        """
        bucket, prefix = split_oss(location)
        connection = self.get_connection(self.oss_conn_id)
        extra = connection.extra_dejson
        auth_type = extra.get("auth_type") or "AK"
        if auth_type not in ("AK", "STS"):
            raise ValueError(
                f"connection {self.oss_conn_id!r}: auth_type {auth_type!r} is not supported; use AK or STS"
            )
        region = extra.get("region") or ""
        values = {
            "access_key_id": extra.get("access_key_id") or connection.login,
            "access_key_secret": extra.get("access_key_secret") or connection.password,
            "region": region,
        }
        missing = [name for name, value in values.items() if not value]
        if missing:
            raise ValueError(f"connection {self.oss_conn_id!r} lacks {', '.join(missing)}; add to its Extra")
        return OssTarget(
            endpoint=extra.get("endpoint") or connection.host or f"https://oss-{region}.aliyuncs.com",
            region=region,
            bucket=bucket,
            prefix=prefix.strip("/"),
            credentials=OssCredentials(
                access_key_id=str(values["access_key_id"]),
                access_key_secret=str(values["access_key_secret"]),
                security_token=extra.get("security_token") or None,
                auth_type="AK",
            ),
        )
