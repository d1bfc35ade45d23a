"""The ``sweep`` verb: folders of old jobs and old downloads go, unless anything living may still need them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from dataclasses import replace
from typing import Iterator, List, Optional, Tuple

from trainer import lease, records
from trainer.files import is_locked, locked, open_lock, try_lock
from trainer.jobs import log_is_held, proven_state
from trainer.paths import JobPaths, NodePaths
from trainer.protocol import JobSpec, Phase, SweepReply, SweepRequest, Swept
from trainer.prune import TRASH, empty_trash, living_jobs, may_live, mentions

_DOWNLOAD = re.compile(r"[0-9a-f]{24}")
_PATIENCE_S = 60.0  # for a start that is under way

#: A download that was wanted within this time (seconds) stays, however full the cache: its training may begin yet.
YOUNG_S = 24 * 3600.0


def sweep(request: SweepRequest) -> SweepReply:
    """Find, and with ``delete`` remove, what is old. A job goes only when it has ended and holds nothing.

    Raises:
        PathError: the work folder's path is refused.
        TimeoutError: a start has been under way for a minute.
    """
    node = NodePaths(request.workdir)
    if not os.path.isdir(node.workdir):
        return SweepReply()
    found = [*_old_jobs(node, request), *_old_downloads(node, request)]
    if request.delete:
        node.create()  # the locks may never have been needed yet
        found = [_remove(node, item) for item in found]
        for parent in (node.jobs, node.cache):
            empty_trash(parent)
    return SweepReply(found)


# -- jobs -----------------------------------------------------------------------------------------------------------


def _old_jobs(node: NodePaths, request: SweepRequest) -> Iterator[Swept]:
    if request.jobs_age_s is None:
        return
    now, holders = time.time(), {holder.job_id for holder in lease.holders(node)}
    old = []
    for job in records.known_jobs(node):
        ended = _ended_at(job)
        if ended is not None and job.job_id not in holders and now - ended > request.jobs_age_s:
            old.append((now - ended, job))
    for age, job in sorted(old, key=lambda pair: -pair[0]):
        yield Swept("job", job.folder, _size(job.folder), age, f"ended {age / 86400:.1f} days ago")


def _ended_at(job: JobPaths) -> Optional[float]:
    """When a job ended, in seconds since the epoch; ``None`` while it lives, or may."""
    state = proven_state(job)
    if may_live(state) or (state.phase == Phase.LOST and log_is_held(job)):
        return None
    try:
        return state.ended_at if state.ended_at is not None else os.stat(job.folder).st_mtime
    except FileNotFoundError:
        return None


# -- downloads ------------------------------------------------------------------------------------------------------


def _old_downloads(node: NodePaths, request: SweepRequest) -> Iterator[Swept]:
    """By age first; then, least recently wanted first, what is over the limit of all together."""
    if request.cache_age_s is None and request.cache_bytes is None:
        return
    living, now = living_jobs(node.workdir), time.time()
    downloads = [(path, wanted, _size(path)) for path, wanted in sorted(_downloads(node), key=lambda pair: pair[1])]
    total = sum(size for _, _, size in downloads)
    for path, wanted, size in downloads:
        age = now - wanted
        if request.cache_age_s is not None and age > request.cache_age_s:
            reason = f"not wanted for {age / 86400:.1f} days"
        elif request.cache_bytes is not None and total > request.cache_bytes and age > YOUNG_S:
            reason = f"all downloads together are {total - request.cache_bytes:,} bytes too large"
        else:
            continue
        if not _is_used(path, living):
            total -= size
            yield Swept("download", path, size, age, reason)


def _downloads(node: NodePaths) -> List[Tuple[str, float]]:
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(node.cache) as entries:
        for entry in entries:
            if _DOWNLOAD.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                found.append((entry.path, entry.stat().st_mtime))
    return found


def _is_used(path: str, living: List[JobSpec]) -> bool:
    return is_locked(os.path.join(path, "lock")) or _is_needed(path, living)


def _is_needed(path: str, living: List[JobSpec]) -> bool:
    return any(mentions(spec, path) for spec in living)


# -- removing -------------------------------------------------------------------------------------------------------


def _remove(node: NodePaths, item: Swept) -> Swept:
    """Out of sight in one step, under the lock that a new user would need; then gone."""
    parent, name = os.path.split(item.path)
    trash = os.path.join(parent, f"{TRASH}{name}-{os.getpid()}")
    try:
        with locked(node.start_lock, _PATIENCE_S):
            if item.kind == "job" and _ended_at(JobPaths(item.path)) is None:
                return replace(item, error="it lives again")
            if item.kind == "download" and not _hide_download(node, item.path, trash):
                return replace(item, error="it is wanted again")
            if item.kind == "job":
                os.rename(item.path, trash)
        shutil.rmtree(trash)
    except OSError as error:
        if os.path.lexists(item.path) or os.path.lexists(trash):  # else somebody was faster
            return replace(item, error=str(error))
    return item


def _hide_download(node: NodePaths, path: str, trash: str) -> bool:
    lock = open_lock(os.path.join(path, "lock"))
    try:
        if not try_lock(lock) or _is_needed(path, living_jobs(node.workdir)):
            return False
        os.rename(path, trash)
        return True
    finally:
        os.close(lock)


def _size(path: str) -> int:
    total = 0
    for where, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total
