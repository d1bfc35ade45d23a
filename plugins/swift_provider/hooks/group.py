"""Held connections to all nodes of a run; every operation runs on all of them at the same time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from swift_provider.exceptions import TrainingError
from swift_provider.hooks.endpoint import SshEndpoint, endpoint_of
from swift_provider.hooks.login import Logins
from swift_provider.hooks.session import DEFAULT_CALL_TIMEOUT_S, NodeSession
from swift_provider.planning.plan import NodePlan

R = TypeVar("R")

#: Logins at the same time.
PARALLEL_LOGINS = 32

# asyncssh writes several INFO lines for each command; at one poll every few seconds they bury everything else.
logging.getLogger("asyncssh").setLevel(logging.WARNING)


class NodeGroup:
    """Held connections to several nodes; every operation runs on all of them at the same time."""

    def __init__(self, nodes: Iterable[NodePlan], endpoints: Mapping[str, SshEndpoint], python: str) -> None:
        self._logins = Logins(PARALLEL_LOGINS)
        self.sessions = {
            node.name: NodeSession(node.name, endpoints[node.name], node.workdir, python, self._logins)
            for node in nodes
        }

    @classmethod
    def over(cls, nodes: Sequence[NodePlan], connections: Mapping[str, Any], python: str) -> Self:
        """The group of ``nodes`` over Airflow's ``connections``, by their ids.

        Raises:
            ValueError: a connection has no host, or an extra is unusable.
        """
        endpoints = {node.name: endpoint_of(connections[node.ssh_conn_id]) for node in nodes}
        return cls(nodes, endpoints, python)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes every connection."""
        await asyncio.gather(*(session.close() for session in self.sessions.values()))
        self._logins.close()

    async def call_each(
        self,
        verb: str,
        requests: Mapping[str, Any],
        reply_type: type[R],
        timeout: float | None = DEFAULT_CALL_TIMEOUT_S,
    ) -> tuple[dict[str, R], dict[str, TrainingError]]:
        """``verb`` on each node of ``requests``; one node's failure does not hide the others' answers.

        Returns:
            Replies and errors, by node name, in the order of ``requests``.
        """

        async def call(name: str, request: Any) -> R | TrainingError:
            try:
                return await self.sessions[name].call(verb, request, reply_type, timeout)
            except TrainingError as error:
                return error

        names = list(requests)
        answers = await asyncio.gather(*(call(name, requests[name]) for name in names))
        replies: dict[str, R] = {}
        errors: dict[str, TrainingError] = {}
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, TrainingError):
                errors[name] = answer
            else:
                replies[name] = answer
        return replies, errors

    async def call_all(
        self,
        verb: str,
        requests: Mapping[str, Any],
        reply_type: type[R],
        timeout: float | None = DEFAULT_CALL_TIMEOUT_S,
    ) -> dict[str, R]:
        """Like :meth:`call_each`, for when every node must answer.

        Raises:
            TrainingError: of the class of the first node's error; the message names all nodes that failed.
        """
        replies, errors = await self.call_each(verb, requests, reply_type, timeout)
        if errors:
            first = next(iter(errors.values()))
            raise type(first)("\n".join(str(error) for error in errors.values())) from None
        return replies
