"""The trigger that follows a gang while its task is deferred: one per run, whatever the number of nodes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

from airflow.sdk.bases.xcom import BaseXCom
from airflow.triggers.base import BaseTrigger, TriggerEvent

from swift_provider.hooks.cancel import cancel_once, cancel_until_heard
from swift_provider.hooks.nodes import NodesHook
from swift_provider.planning.gang import cancel_reason
from swift_provider.planning.plan import NodePlan
from swift_provider.triggers.collector import spare_the_event_loop
from swift_provider.triggers.follower import GangFollower
from trainer import protocol
from trainer.protocol import Owner

#: XCom key of the live progress; the run page and the REST API read it while the task is deferred.
XCOM_PROGRESS = "progress"
#: Airflow 3.3 can fail a deferred task whose trigger fires within seconds of the deferral (0 of 20 at 5 s).
FIRST_EVENT_AFTER_S = 6.0
#: Log lines per call of the task logger: one call per line blocks the triggerer's event loop.
LINES_PER_RECORD = 50
#: Between two polls while a node has more log than one poll reads (seconds).
BACKLOG_PAUSE_S = 0.2

_KEEP: set[asyncio.Task[None]] = set()


class GangTrigger(BaseTrigger):
    """Follows the jobs of one generation until all have ended, the deadline is over, or a node is lost.

    Args:
        nodes: the plan's nodes, as JSON.
        python: interpreter of the training environment on the nodes.
        job_id: the same on all nodes.
        owner: who the leases belong to, as JSON.
        deadline: seconds since the epoch, or ``None``.
        poll_interval: seconds between two looks.
        unreachable_grace: seconds that a node may be out of reach while the run does not step.
    """

    def __init__(
        self,
        nodes: list[dict[str, Any]],
        python: str,
        job_id: str,
        owner: dict[str, Any],
        deadline: float | None = None,
        poll_interval: float = 2.0,
        unreachable_grace: float = 600.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes, self.python, self.job_id, self.owner, self.deadline = nodes, python, job_id, owner, deadline
        self.poll_interval, self.unreachable_grace = poll_interval, unreachable_grace
        self._follower: GangFollower | None = None
        self._killing = False

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """What another triggerer needs to go on."""
        return (
            "swift_provider.triggers.gang.GangTrigger",
            {
                "nodes": self.nodes,
                "python": self.python,
                "job_id": self.job_id,
                "owner": self.owner,
                "deadline": self.deadline,
                "poll_interval": self.poll_interval,
                "unreachable_grace": self.unreachable_grace,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yields exactly one event."""
        started = time.monotonic()
        spare_the_event_loop()
        # Connections are looked up first: the first lookup of a triggerer takes seconds, too long inside on_kill.
        group = await self._hook().agroup()
        earlier = await self._last_progress() or {}
        follower = GangFollower(
            group,
            self.job_id,
            earlier.get("log_offsets") or {},
            self.unreachable_grace,
            earlier.get("solo_world") or (),
        )
        self._follower = follower
        status = ""
        while not status:
            await self._write_log(await follower.poll())
            await self._publish(follower)
            status = self._status(follower)
            if status == "ended" and follower.behind:
                status = ""  # the rest comes in pieces too: a long log must not be in memory at once
            if not status:
                await asyncio.sleep(self._pause(follower))
        if status == "ended":
            await self._write_log(await follower.drain())
            await self._publish(follower)
        await asyncio.sleep(max(0.0, FIRST_EVENT_AFTER_S - (time.monotonic() - started)))
        yield TriggerEvent(self._event(status, follower))  # type: ignore[no-untyped-call]

    def _hook(self) -> NodesHook:
        return NodesHook([NodePlan(**node) for node in self.nodes], self.python)

    def _pause(self, follower: GangFollower) -> float:
        if follower.behind:
            return min(BACKLOG_PAUSE_S, self.poll_interval)
        # With jitter: polls of many runs that a busy moment has brought together come apart again.
        return self.poll_interval * random.uniform(0.9, 1.1)  # noqa: S311 - no secret

    def _status(self, follower: GangFollower) -> str:
        if follower.over:
            return "ended"
        if self.deadline is not None and time.time() > self.deadline:
            return "deadline"
        return "lost" if follower.lost_nodes else ""

    def _event(self, status: str, follower: GangFollower) -> dict[str, Any]:
        progress = follower.progress
        return {
            "status": status,
            "job_id": self.job_id,
            "states": {name: asdict(state) for name, state in follower.states.items()},
            "tails": {name: list(view.tail) for name, view in follower.views.items()},
            "problems": {name: view.problem for name, view in follower.views.items() if view.problem},
            "lost_nodes": follower.lost_nodes,
            "solo_world": follower.solo_world,
            "progress": asdict(progress) if progress else None,
        }

    async def _write_log(self, lines: dict[str, list[str]]) -> None:
        for name, new in lines.items():
            for start in range(0, len(new), LINES_PER_RECORD):
                block = new[start : start + LINES_PER_RECORD]
                self.log.info("%s", "\n".join(f"[{name}] {line}" for line in block))
                await asyncio.sleep(0)

    async def _publish(self, follower: GangFollower) -> None:
        progress = follower.progress
        value = {
            "updated_at": time.time(),
            "job_id": self.job_id,
            "progress": asdict(progress) if progress else None,
            "nodes": {
                name: {
                    "phase": state.phase,
                    "checkpoints": state.checkpoints,
                    "log_bytes": state.log_bytes,
                    "problem": follower.views[name].problem,
                    "mirror": asdict(state.mirror) if state.mirror else None,
                }
                for name, state in follower.states.items()
            },
            "log_offsets": follower.offsets,
            "solo_world": follower.solo_world,
        }
        try:
            await BaseXCom.aset(key=XCOM_PROGRESS, value=value, **self._xcom_address())
        except Exception as error:  # progress is a courtesy: no failure to show it may end the following
            self.log.warning("progress could not be written: %s", error)

    async def _last_progress(self) -> dict[str, Any] | None:
        try:
            value = await BaseXCom.aget_one(key=XCOM_PROGRESS, **self._xcom_address())
        except Exception as error:
            self.log.info("no earlier progress: %s", error)
            return None
        return value if isinstance(value, dict) and value.get("job_id") == self.job_id else None

    @property
    def _identity(self) -> Any:
        if self.task_instance is None:
            raise RuntimeError("this trigger runs for a task only, not for an asset")
        return self.task_instance

    def _xcom_address(self) -> dict[str, Any]:
        ti = self._identity
        map_index = ti.map_index if ti.map_index is not None else -1
        return {"dag_id": ti.dag_id, "run_id": ti.run_id, "task_id": ti.task_id, "map_index": map_index}

    async def on_kill(self) -> None:
        """A user marked the task or cleared it: every process of the job on every node ends.

        Airflow cancels this method again about once a second, so the work runs in a task of its own. Nodes that are
        out of reach are tried again in the background, for as long as this triggerer lives.
        """
        self._killing = True
        first_round = asyncio.Event()
        work = asyncio.ensure_future(self._cancel_everywhere(first_round))
        _KEEP.add(work)
        work.add_done_callback(_KEEP.discard)
        while not first_round.is_set():
            try:
                await first_round.wait()
            except asyncio.CancelledError:
                continue

    async def _cancel_everywhere(self, first_round: asyncio.Event) -> None:
        try_number = self._identity.try_number
        owner = replace(protocol.from_dict(Owner, self.owner), try_number=try_number)
        reason = cancel_reason(try_number)
        try:
            group = self._follower.group if self._follower else await self._hook().agroup()
            left = set(await cancel_once(group, owner, reason))
        except Exception:
            self.log.exception("the training could not be cancelled from here")
            return
        finally:
            first_round.set()
        if left:
            await cancel_until_heard(group, owner, reason, left)
        await group.close()

    async def cleanup(self) -> None:
        """Lets go of the connections, never of the training: this also runs when a triggerer shuts down."""
        if self._follower is not None and not self._killing:
            await self._follower.close()
