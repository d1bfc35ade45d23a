"""The ``prune`` verb: delete checkpoint folders, each in one step as far as any reader can see."""

from __future__ import annotations

import os
import re
import shutil
from typing import List, Tuple

from trainer import records
from trainer.checkpoints.completeness import step_of
from trainer.checkpoints.scan import link_target
from trainer.jobs import proven_state
from trainer.paths import NodePaths
from trainer.protocol import JobSpec, JobState, Phase, PruneReply, PruneRequest

#: How the name of a folder begins that is being deleted: out of sight in one step, then gone.
TRASH = ".trash-"


def prune(request: PruneRequest) -> PruneReply:
    """Delete the named checkpoints. What an earlier prune left half deleted is finished, too.

    Refused: names that are not ``checkpoint-<step>``, links, names in ``keep``, the one that ``last-checkpoint``
    points at, and what a living job uses.
    """
    reply = PruneReply()
    living = living_jobs(request.workdir)
    protected = set(request.keep) | {link_target(request.output_dir, "last-checkpoint")}
    for name in request.delete:
        path = os.path.join(request.output_dir, name)
        refusal = _refusal(name, path, name in protected) or _user_of(living, request.output_dir, path)
        if refusal:
            reply.errors[name] = refusal
            continue
        try:
            reply.deleted[name] = _size(path)
            if not request.dry_run:
                _remove(request.output_dir, name)
        except FileNotFoundError:
            reply.deleted[name] = 0  # the trainer's own rotation was faster
        except OSError as error:
            reply.deleted.pop(name, None)
            reply.errors[name] = str(error)
    if not request.dry_run:
        empty_trash(request.output_dir)
    return reply


def _refusal(name: str, path: str, protected: bool) -> str:
    if step_of(name) is None:
        return "not a checkpoint-<step> name"
    if protected:
        return "protected: it is to be kept, or last-checkpoint points at it"
    if os.path.islink(path):
        return "a link, not a folder"
    return ""


def living_jobs(workdir: str) -> List[JobSpec]:
    """What every job of the node was started with that may still read and write files; none without a ``workdir``."""
    if not workdir:
        return []
    node = NodePaths(workdir)
    living = [job for job in records.known_jobs(node) if may_live(proven_state(job))]
    specs = [records.read_spec(job) for job in living]
    return [spec for spec in specs if spec is not None]


def may_live(state: JobState) -> bool:
    """Whether a job, or what a dead supervisor left of it, may still read and write files."""
    return state.phase in Phase.ALIVE or (state.phase == Phase.LOST and state.ended_at is None)


def _user_of(living: List[JobSpec], output_dir: str, path: str) -> str:
    """Which living job needs the checkpoint at ``path``, as a refusal; ``""``: none."""
    for spec in living:
        if spec.output_dir and os.path.realpath(spec.output_dir) == os.path.realpath(output_dir):
            return f"in use: job {spec.job_id} writes into this folder"
        if mentions(spec, path):
            return f"in use: job {spec.job_id} was started with it"
    return ""


def mentions(spec: JobSpec, path: str) -> bool:
    """Whether the arguments, environment or files of a job name ``path`` or something below it."""
    pattern = re.compile(re.escape(os.path.normpath(path)) + r"(?![\w.-])")
    return any(pattern.search(text) for text in (*spec.argv, *spec.env.values(), *spec.files.values()))


def _remove(output_dir: str, name: str) -> None:
    trash = os.path.join(output_dir, f"{TRASH}{name}-{os.getpid()}")
    os.rename(os.path.join(output_dir, name), trash)
    shutil.rmtree(trash)


def empty_trash(folder: str) -> None:
    """Finish the deletions in ``folder`` that were cut off."""
    for name, path in _entries(folder):
        if name.startswith(TRASH) and os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)


def _entries(folder: str) -> list[Tuple[str, str]]:
    try:
        return [(name, os.path.join(folder, name)) for name in os.listdir(folder)]
    except FileNotFoundError:
        return []


def _size(path: str) -> int:
    os.stat(path)
    return sum(os.lstat(os.path.join(where, name)).st_size for where, _, names in os.walk(path) for name in names)
