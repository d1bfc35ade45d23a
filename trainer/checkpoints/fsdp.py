"""FSDP with sharded state: model and optimizer are two distributed checkpoints."""

from __future__ import annotations

from typing import List

from trainer.checkpoints import distributed
from trainer.checkpoints.judgement import Files, Finding

NAME = "fsdp"
_FOLDERS = r"(pytorch_model_fsdp_\d+|optimizer_\d+)/.*"


def matches(files: Files) -> bool:
    """Whether FSDP has begun to write here."""
    return bool(files.matching(_FOLDERS))


def world_size(_files: Files) -> int:
    """0: a rank may write any number of files."""
    return 0


def check(files: Files, _world_size: int) -> List[Finding]:
    """What is missing or broken in the two folders."""
    there = {match.group(1) for match in files.matching(_FOLDERS)}
    found = files.need("scheduler.pt")
    for folder in sorted(there | {"pytorch_model_fsdp_0", "optimizer_0"}):
        found += distributed.check(files, folder)
    return found
