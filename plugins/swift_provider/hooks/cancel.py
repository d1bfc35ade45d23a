"""Ending everything that one task has on its nodes: what a user's cancel means, whoever hears of it first."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING

from swift_provider.exceptions import TrainingError
from trainer.protocol import CancelReply, CancelRequest, Owner

if TYPE_CHECKING:
    from swift_provider.hooks.group import NodeGroup


log = logging.getLogger(__name__)

#: How long nodes that do not answer are tried again (seconds). Housekeeping finds what is left after that.
KEEP_TRYING_S = 3600.0
LONGEST_PAUSE_S = 30.0


async def cancel_once(
    group: NodeGroup, owner: Owner, reason: str, names: set[str] | None = None
) -> dict[str, TrainingError]:
    """Asks the named nodes (default: all) to end the task's jobs and to refuse later starts of the same try.

    Returns:
        The nodes that did not answer, and why.
    """
    requests = {
        name: CancelRequest(workdir=session.workdir, owner=owner, reason=reason)
        for name, session in group.sessions.items()
        if names is None or name in names
    }
    replies, errors = await group.call_each("cancel", requests, CancelReply, timeout=60.0)
    for name, reply in replies.items():
        for job in reply.jobs:
            log.info("%s: job %s was %s and has been asked to stop: %s", name, job.job_id, job.phase, reason)
    return errors


async def cancel_until_heard(
    group: NodeGroup, owner: Owner, reason: str, names: set[str] | None = None, keep_trying: float = KEEP_TRYING_S
) -> set[str]:
    """Like :func:`cancel_once`, again and again for nodes that are out of reach at this moment.

    Returns:
        Nodes that were not reached within ``keep_trying`` seconds.
    """
    limit = time.monotonic() + keep_trying
    pause = 1.0
    left = set(await cancel_once(group, owner, reason, names))
    while left and time.monotonic() < limit:
        await asyncio.sleep(random.uniform(pause / 2, pause))  # noqa: S311 - jitter, not a secret
        pause = min(LONGEST_PAUSE_S, 2 * pause)
        left = set(await cancel_once(group, owner, reason, left))
    if left:
        log.error("%s could not be told to stop the jobs of %s", ", ".join(sorted(left)), owner)
    return left
