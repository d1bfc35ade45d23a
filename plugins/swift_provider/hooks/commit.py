"""The word to start for a prepared job, over the open SFTP channel: no program runs on the node for it."""

from __future__ import annotations

import asyncio
import posixpath
import time
from typing import TYPE_CHECKING

from swift_provider.exceptions import TrainingError
from trainer import protocol
from trainer.paths import JobPaths
from trainer.protocol import CommitReply, JobState, Phase

if TYPE_CHECKING:
    from swift_provider.hooks.session import NodeSession

#: How long the state file is watched for the start (seconds); the ``commit`` verb waits longer, and knows why not.
QUICK_COMMIT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.25


async def commit_by_file(session: NodeSession, job_id: str) -> CommitReply | None:
    """Leaves the word to start and waits until the job runs.

    Returns:
        ``None`` for whatever else than a running job comes of it: ask the ``commit`` verb, which may be said again.
    """
    job = JobPaths(posixpath.join(session.workdir, "jobs", job_id))
    limit, pause = time.monotonic() + QUICK_COMMIT_S, FIRST_PAUSE_S
    try:
        await session.touch(job.commit)
        while time.monotonic() < limit:
            await asyncio.sleep(pause)
            data = await session.read(job.state)
            state = protocol.loads(JobState, (data or b"").decode())
            if state.phase == Phase.RUNNING:
                return CommitReply(state)
            if state.phase != Phase.PREPARING:
                return None
            pause = min(2 * pause, LONGEST_PAUSE_S)
    except (TrainingError, protocol.ProtocolError, UnicodeDecodeError):
        return None
    return None
