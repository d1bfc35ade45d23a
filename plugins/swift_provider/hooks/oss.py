"""The bucket, through Airflow's ordinary ``oss`` connection, for ``oss2`` on this side and on the nodes."""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseHook

from swift_provider.config.bucket import target_of
from swift_provider.config.checkpoints import Storage
from trainer.protocol import OssTarget


class OSSHook(BaseHook):
    """Turns a connection and a location into an :class:`~trainer.protocol.OssTarget`.

    :func:`~swift_provider.config.bucket.target_of` says which fields the connection has.

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

    def target(self, location: str, storage: Storage | None = None) -> OssTarget:
        """Where ``oss://bucket/prefix`` is, how to sign for it, and how to store what is written.

        Raises:
            AirflowNotFoundException: the connection does not exist.
            ValueError: the location or the connection is incomplete; the message names the field.
        """
        connection = self.get_connection(self.oss_conn_id)
        return target_of(
            location,
            f"connection {self.oss_conn_id!r}",
            connection.extra_dejson,
            login=connection.login,
            password=connection.password,
            host=connection.host,
            storage=storage,
        )
