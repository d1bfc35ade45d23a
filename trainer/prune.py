"""The ``prune`` verb: delete checkpoint folders, each in one step as far as any reader can see."""

from __future__ import annotations

import os
import shutil
from typing import Tuple

from trainer.checkpoints.completeness import step_of
from trainer.checkpoints.scan import link_target
from trainer.protocol import PruneReply, PruneRequest

_TRASH = ".trash-"


def prune(request: PruneRequest) -> PruneReply:
    """Delete the named checkpoints. What an earlier prune left half deleted is finished, too.

    Refused: names that are not ``checkpoint-<step>``, links, names in ``keep``, and the one that ``last-checkpoint``
    points at.
    """
    reply = PruneReply()
    protected = set(request.keep) | {link_target(request.output_dir, "last-checkpoint")}
    for name in request.delete:
        path = os.path.join(request.output_dir, name)
        refusal = _refusal(name, path, name in protected)
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
        _empty_trash(request.output_dir)
    return reply


def _refusal(name: str, path: str, protected: bool) -> str:
    if step_of(name) is None:
        return "not a checkpoint-<step> name"
    if protected:
        return "protected: it is to be kept, or last-checkpoint points at it"
    if os.path.islink(path):
        return "a link, not a folder"
    return ""


def _remove(output_dir: str, name: str) -> None:
    trash = os.path.join(output_dir, f"{_TRASH}{name}-{os.getpid()}")
    os.rename(os.path.join(output_dir, name), trash)
    shutil.rmtree(trash)


def _empty_trash(output_dir: str) -> None:
    for name, path in _entries(output_dir):
        if name.startswith(_TRASH) and os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)


def _entries(folder: str) -> list[Tuple[str, str]]:
    try:
        return [(name, os.path.join(folder, name)) for name in os.listdir(folder)]
    except FileNotFoundError:
        return []


def _size(path: str) -> int:
    os.stat(path)
    return sum(os.lstat(os.path.join(where, name)).st_size for where, _, names in os.walk(path) for name in names)
