"""Follows the jobs of a gang over held connections: states, log lines, what is unreachable, when it is over.

Knows nothing of Airflow, so that it can be tested against real nodes without one.
"""

from __future__ import annotations

import asyncio
import posixpath
import random
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swift_provider.exceptions import TrainingError
from swift_provider.planning.gang import ended_well
from swift_provider.triggers.logs import LogCursor
from trainer import protocol
from trainer.protocol import JobState, Phase, Progress, StatusReply, StatusRequest, StopReply, StopRequest

if TYPE_CHECKING:
    from swift_provider.hooks.group import NodeGroup
    from swift_provider.hooks.session import NodeSession


#: Bytes of log read from one node in one poll; a larger backlog is worked off over several.
LOG_CHUNK = 4 * 1024 * 1024
#: A heartbeat that stands still this long (seconds) makes us ask the node for proof.
STALE_HEARTBEAT_S = 15.0
#: How long a node may be unreachable while the run does not step, before it counts as lost (seconds).
UNREACHABLE_GRACE_S = 600.0
TAIL_LINES = 200
#: Bytes before the position to go on from that fill the tail again: evidence that another follower has handed out.
RECALL_BYTES = 64 * 1024
#: How long one round of looks waits for the slowest node (seconds).
LOOK_PATIENCE_S = 5.0
#: Between two tries to reach a node that does not answer, at most (seconds).
LONGEST_PAUSE_S = 30.0
#: ms-swift prints this when its ranks did not find each other and each trains alone, with exit status 0.
SOLO_WORLD = "parallel_mode != ParallelMode.DISTRIBUTED"


@dataclass
class NodeView:
    """What is known of one node. Times are on the monotonic clock.

    ``handed_out`` is the cursor's offset without the lines that :meth:`GangFollower.poll` has not returned yet.
    """

    cursor: LogCursor
    handed_out: int = 0
    state: JobState | None = None
    heartbeat_seen: float = 0.0
    unreachable_since: float | None = None
    failures: int = 0
    next_look: float = 0.0
    look: asyncio.Task[list[str]] | None = None
    problem: str = ""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    solo_world: bool = False
    behind: bool = False
    recalled: bool = False

    @property
    def ended(self) -> bool:
        """No process of the job is left on this node."""
        return self.state is not None and self.state.phase in Phase.ENDED

    @property
    def failed(self) -> bool:
        """The job ended badly, or is about to: its supervisor has seen a rank die or is ending it."""
        if self.state is None:
            return False
        if self.ended:
            return not ended_well(self.state)
        return self.state.error is not None or self.state.phase == Phase.STOPPING


class GangFollower:
    """The jobs of one generation.

    Each node is looked at in a task of its own, so that one that does not answer never delays the others.

    Args:
        group: the nodes, connected or not.
        job_id: the same on all nodes.
        offsets: for each node the byte of its log to go on from.
        unreachable_grace: seconds, see :data:`UNREACHABLE_GRACE_S`.
        solo_world: nodes of which an earlier follower has seen that their ranks trained alone.
    """

    def __init__(
        self,
        group: NodeGroup,
        job_id: str,
        offsets: Mapping[str, int] | None = None,
        unreachable_grace: float = UNREACHABLE_GRACE_S,
        solo_world: Collection[str] = (),
    ) -> None:
        self.group, self.job_id, self.unreachable_grace = group, job_id, unreachable_grace
        offsets = offsets or {}
        now = time.monotonic()
        self.views = {
            name: NodeView(LogCursor(start), handed_out=start, heartbeat_seen=now, solo_world=name in solo_world)
            for name, start in ((name, offsets.get(name, 0)) for name in group.sessions)
        }
        self._last_step: tuple[int, float] = (-1, now)
        self._stop_sent: set[str] = set()

    async def poll(self, patience: float = LOOK_PATIENCE_S) -> dict[str, list[str]]:
        """One look at every node at the same time; a node that takes longer than ``patience`` seconds is left to it.

        Returns:
            New log lines, by node name.
        """
        now = time.monotonic()
        for name, view in self.views.items():
            if view.look is None and now >= view.next_look:
                view.look = asyncio.create_task(self._look_at(name))
        looks = [view.look for view in self.views.values() if view.look is not None]
        if looks:
            await asyncio.wait(looks, timeout=patience)
        lines = {name: self._collect(view) for name, view in self.views.items()}
        step = self.progress.step if self.progress else -1
        if step > self._last_step[0]:
            self._last_step = (step, time.monotonic())
        await self._stop_peers_of_failed()
        return {name: new for name, new in lines.items() if new}

    def _collect(self, view: NodeView) -> list[str]:
        if view.look is None or not view.look.done():
            return []
        look, view.look = view.look, None
        lines = look.result()
        view.handed_out = view.cursor.offset
        view.tail.extend(lines)
        view.solo_world = view.solo_world or any(SOLO_WORLD in line for line in lines)
        return lines

    async def _look_at(self, name: str) -> list[str]:
        view, session = self.views[name], self.group.sessions[name]
        try:
            await self._read_state(view, session)
            lines = await self._read_log(view, session)
        except TrainingError as error:
            now = time.monotonic()
            if view.unreachable_since is None:
                view.unreachable_since = now
            view.problem = str(error)
            view.failures += 1
            pause = min(LONGEST_PAUSE_S, 2.0**view.failures)
            view.next_look = now + random.uniform(pause / 2, pause)  # noqa: S311 - jitter, not a secret
            return []
        view.unreachable_since, view.failures, view.problem = None, 0, ""
        return lines

    async def close(self) -> None:
        """Ends the looks that are under way and lets go of the connections."""
        looks = [view.look for view in self.views.values() if view.look is not None]
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
        await self.group.close()

    async def _read_state(self, view: NodeView, session: NodeSession) -> None:
        if view.ended:
            return  # an end is final: the last state that a dead supervisor wrote still says that it runs
        text = await session.read(self._path(session, "state.json"))
        state = protocol.loads(JobState, text.decode()) if text else None
        now = time.monotonic()
        if state is not None and (view.state is None or state.heartbeat != view.state.heartbeat):
            view.heartbeat_seen = now
        elif now - view.heartbeat_seen > STALE_HEARTBEAT_S and not view.ended:
            request = StatusRequest(workdir=session.workdir, job_id=self.job_id)
            state = (await session.call("status", request, StatusReply)).state
            view.heartbeat_seen = now
        view.state = state or view.state

    async def _read_log(self, view: NodeView, session: NodeSession) -> list[str]:
        path = self._path(session, "log")
        if not view.recalled:
            await self._recall(view, session, path)
        data = await session.read(path, view.cursor.read_offset, LOG_CHUNK) or b""
        view.behind = len(data) == LOG_CHUNK
        return view.cursor.feed(data) if data else []

    async def _recall(self, view: NodeView, session: NodeSession, path: str) -> None:
        start = max(0, view.cursor.offset - RECALL_BYTES)
        size = view.cursor.offset - start
        data = await session.read(path, start, size) if size else None
        lines = LogCursor().feed(data) if data else []
        view.tail.extend(lines[1:] if start else lines)  # the first one is cut
        view.recalled = True

    async def drain(self) -> dict[str, list[str]]:
        """What is left of every reachable node's log, to its last byte. Call it when the gang is over."""
        return {name: new for name in self.views if (new := await self._drain_node(name))}

    async def _drain_node(self, name: str) -> list[str]:
        view, session = self.views[name], self.group.sessions[name]
        earlier: list[str] = []
        if view.look is not None:  # it holds lines, and the cursor has passed them
            await asyncio.wait([view.look])
            earlier = self._collect(view)
        lines: list[str] = []
        try:
            while data := await session.read(self._path(session, "log"), view.cursor.read_offset, LOG_CHUNK):
                lines += view.cursor.feed(data)
        except TrainingError as error:
            view.problem = str(error)
        lines += view.cursor.flush()
        view.handed_out = view.cursor.offset
        view.tail.extend(lines)
        return earlier + lines

    def _path(self, session: NodeSession, file: str) -> str:
        return posixpath.join(session.workdir, "jobs", self.job_id, file)

    @property
    def states(self) -> dict[str, JobState]:
        """The last known state of each node; a node never seen counts as absent."""
        absent = JobState(job_id=self.job_id, phase=Phase.ABSENT)
        return {name: view.state or absent for name, view in self.views.items()}

    @property
    def progress(self) -> Progress | None:
        """The progress of the node that is furthest; only one node writes ``logging.jsonl``."""
        known = [view.state.progress for view in self.views.values() if view.state and view.state.progress]
        return max(known, key=lambda progress: progress.step, default=None)

    @property
    def over(self) -> bool:
        """Every job has ended."""
        return all(view.ended for view in self.views.values())

    @property
    def behind(self) -> bool:
        """A node in reach has more log than one look reads."""
        return any(view.behind and view.unreachable_since is None for view in self.views.values())

    @property
    def lost_nodes(self) -> list[str]:
        """Nodes out of reach for longer than the grace, if the run has not stepped for as long either."""
        now = time.monotonic()
        if now - self._last_step[1] < self.unreachable_grace:
            return []
        return [
            name
            for name, view in self.views.items()
            if view.unreachable_since is not None and now - view.unreachable_since >= self.unreachable_grace
        ]

    @property
    def offsets(self) -> dict[str, int]:
        """For each node the byte of its log from which another follower can go on."""
        return {name: view.handed_out for name, view in self.views.items()}

    @property
    def solo_world(self) -> list[str]:
        """Nodes whose ranks did not find the others, and each trains alone."""
        return [name for name, view in self.views.items() if view.solo_world]

    async def _stop_peers_of_failed(self) -> None:
        """A gang lives and dies together: when one job fails, the others are asked to stop."""
        failed = [name for name, view in self.views.items() if view.failed]
        if failed:
            rest = [
                name
                for name, view in self.views.items()
                if not (name in failed or name in self._stop_sent or view.ended or view.unreachable_since is not None)
            ]
            if rest:
                await self.stop(f"{failed[0]} failed", rest)

    async def stop(self, reason: str, names: list[str] | None = None) -> set[str]:
        """Asks the supervisors to end their jobs, without waiting for the jobs to be gone.

        Returns:
            The nodes that could not be asked.
        """
        requests = {
            name: StopRequest(workdir=self.group.sessions[name].workdir, job_id=self.job_id, reason=reason)
            for name in (self.views if names is None else names)
        }
        replies, errors = await self.group.call_each("stop", requests, StopReply, timeout=30.0)
        self._stop_sent |= set(replies)
        return set(errors)
