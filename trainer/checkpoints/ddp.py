"""Optimizer state of plain data-parallel training: every rank's optimizer is the same, so it is saved once."""

from __future__ import annotations

from typing import List

from trainer.checkpoints.judgement import Files, Finding

NAME = "ddp"


def matches(files: Files) -> bool:
    """Whether there is an optimizer file."""
    return "optimizer.pt" in files or "optimizer.bin" in files


def world_size(_files: Files) -> int:
    """0: the files do not tell."""
    return 0


def check(files: Files, _world_size: int) -> List[Finding]:
    """What is missing or broken in the optimizer state."""
    return files.need("optimizer.pt" if "optimizer.pt" in files else "optimizer.bin", "scheduler.pt")
