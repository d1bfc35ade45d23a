"""The second line of a user's cancel: heard in the API server, also when no triggerer is up.

Airflow tells listeners of every change of a task's state. One that has no previous state was made by hand, in the UI
or over the REST API; only those concern us. The trigger's own ``on_kill`` does the same work where a triggerer lives;
both may, since a cancel that comes twice changes nothing.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from airflow.listeners import hookimpl

log = logging.getLogger(__name__)

#: XCom key under which the train task leaves what is needed to cancel it.
XCOM_GANG = "gang"


@hookimpl
def on_task_instance_failed(previous_state: Any, task_instance: Any) -> None:
    """Marked failed."""
    _heard(previous_state, task_instance, "marked failed")


@hookimpl
def on_task_instance_success(previous_state: Any, task_instance: Any) -> None:
    """Marked successful."""
    _heard(previous_state, task_instance, "marked successful")


@hookimpl
def on_task_instance_skipped(previous_state: Any, task_instance: Any) -> None:
    """Marked skipped."""
    _heard(previous_state, task_instance, "marked skipped")


def _heard(previous_state: Any, task_instance: Any, what: str) -> None:
    if previous_state is not None:
        return
    identity = {
        "dag_id": task_instance.dag_id,
        "run_id": task_instance.run_id,
        "task_id": task_instance.task_id,
        "map_index": task_instance.map_index,
    }
    arguments = (identity, task_instance.try_number, what)
    # The request that changed the state must not wait for machines elsewhere.
    threading.Thread(target=_cancel, args=arguments, name="swift-cancel", daemon=True).start()


def _cancel(identity: dict[str, Any], try_number: int, what: str) -> None:
    try:
        gang = _read_gang(identity)
        if gang is not None:
            _cancel_gang(gang, try_number, what)
    except Exception:
        log.exception("the training of %s could not be cancelled from here", identity)


def _read_gang(identity: dict[str, Any]) -> Any:
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session

    query = XComModel.get_many(
        run_id=identity["run_id"],
        key=XCOM_GANG,
        dag_ids=identity["dag_id"],
        task_ids=identity["task_id"],
        map_indexes=identity["map_index"],
        limit=1,
    )
    with create_session() as session:
        row = session.scalars(query).first()
        return XComModel.deserialize_value(row) if row is not None else None


def _cancel_gang(gang: dict[str, Any], try_number: int, what: str) -> None:
    import asyncio
    from dataclasses import replace

    from airflow.models.connection import Connection

    from swift_provider.hooks.cancel import cancel_until_heard
    from swift_provider.hooks.group import NodeGroup
    from swift_provider.planning.gang import cancel_reason
    from swift_provider.planning.plan import NodePlan
    from trainer import protocol

    nodes = [NodePlan.model_validate(node) for node in gang["nodes"]]
    connections = {node.ssh_conn_id: Connection.get_connection_from_secrets(node.ssh_conn_id) for node in nodes}
    owner = replace(protocol.from_dict(protocol.Owner, gang["owner"]), try_number=try_number)

    async def run() -> None:
        async with NodeGroup.over(nodes, connections, gang["python"]) as group:
            await cancel_until_heard(group, owner, cancel_reason(try_number))

    log.info("task %s of run %s was %s: cancelling its training", owner.task_id, owner.run_id, what)
    asyncio.run(run())
