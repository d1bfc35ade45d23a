"""The nodes of a plan outside of a running Airflow: for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swift_provider.config import Cluster

if TYPE_CHECKING:
    from swift_provider.hooks.group import NodeGroup
    from swift_provider.planning.plan import LaunchPlan


class ConnectionMissing(LookupError):
    """A node can be reached by nothing: it has no Airflow connection, and the cluster file no address for it."""


def connections_of(cluster: Cluster) -> dict[str, Any]:
    """For each ``ssh_conn_id`` of a cluster its connection: Airflow's (``AIRFLOW_CONN_…``, its secrets backends, its
    database), else the node's own address with the keys, ``known_hosts`` and ``~/.ssh/config`` of whoever calls.

    Raises:
        ConnectionMissing: some nodes have neither; names all of them.
    """
    from airflow.models.connection import Connection
    from airflow.sdk.exceptions import AirflowNotFoundException

    found: dict[str, Any] = {}
    missing = []
    for node in cluster.nodes:
        try:
            found[node.ssh_conn_id] = Connection.get_connection_from_secrets(node.ssh_conn_id)
        except AirflowNotFoundException:
            if node.address is None:
                missing.append(
                    f"clusters/{cluster.name}.yaml: nodes: {node.name}: there is no Airflow connection"
                    f" {node.ssh_conn_id!r}, and the node has no address; add one of the two"
                )
                continue
            found[node.ssh_conn_id] = Connection(conn_id=node.ssh_conn_id, conn_type="ssh", host=node.address)
    if missing:
        raise ConnectionMissing("\n".join(missing))
    return found


def group_over(plan: LaunchPlan, connections: Mapping[str, Any]) -> NodeGroup:
    """The nodes of ``plan`` as a group, over ``connections`` by their id.

    Raises:
        ValueError: a connection has no host, or an extra is unusable.
    """
    from swift_provider.hooks.group import NodeGroup

    return NodeGroup.over(plan.nodes, connections, plan.agent_python)
