"""The nodes of a plan, through ordinary Airflow ``ssh`` connections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from airflow.sdk import BaseHook

from swift_provider.planning.plan import LaunchPlan, NodePlan

if TYPE_CHECKING:
    from swift_provider.hooks.group import NodeGroup


class NodesHook(BaseHook):
    """Resolves the connections of a plan's nodes and opens them together as a :class:`NodeGroup`.

    Connections are looked up here, before any event loop runs in a worker, or with ``await`` in a triggerer.

    Args:
        nodes: the nodes of a launch plan.
        python: interpreter that the agent runs with on the nodes.
    """

    def __init__(self, nodes: Iterable[NodePlan], python: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.nodes, self.python = list(nodes), python

    @classmethod
    def for_plan(cls, plan: LaunchPlan) -> Self:
        """The hook for all nodes of ``plan``."""
        return cls(plan.nodes, plan.agent_python)

    def group(self) -> NodeGroup:
        """The nodes as a group, for use in a worker.

        Raises:
            AirflowNotFoundException: a connection does not exist.
        """
        return self._group({node.ssh_conn_id: self.get_connection(node.ssh_conn_id) for node in self.nodes})

    async def agroup(self) -> NodeGroup:
        """The nodes as a group, for use in a triggerer."""
        return self._group({node.ssh_conn_id: await self.aget_connection(node.ssh_conn_id) for node in self.nodes})

    def _group(self, connections: Mapping[str, Any]) -> NodeGroup:
        # Imported here: a DAG file is parsed again and again, and asyncssh alone costs more than all the rest.
        from swift_provider.hooks.group import NodeGroup

        return NodeGroup.over(self.nodes, connections, self.python)
