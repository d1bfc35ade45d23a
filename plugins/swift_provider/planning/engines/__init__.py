"""The engines that ms-swift trains with: what each asks of the arguments, its arithmetic, and how it resumes.

One file per engine, all of the same shape. The first one that matches is taken; ``ddp`` takes what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from swift_provider.planning.engines import ddp, deepspeed, fsdp, megatron
from swift_provider.planning.engines.setting import DDP_TIMEOUT_S, Batch, Finding, Setting

__all__ = ["DDP_TIMEOUT_S", "ENGINES", "Batch", "Engine", "Finding", "Setting", "choose"]


class Engine(Protocol):
    """What each file of this package offers."""

    NAME: str

    def matches(self, command: str, args: Mapping[str, Any]) -> bool:
        """Whether ms-swift would train with this engine."""

    def complete(self, args: dict[str, Any], setting: Setting) -> list[Finding]:
        """Completes ``args`` and the setting's files in place; returns what cannot work and what is worth a remark."""

    def batch(self, args: Mapping[str, Any], world_size: int) -> Batch:
        """How many samples a step takes, as ms-swift computes it. Never fails: wrong values are findings."""

    def resume(self, args: Mapping[str, Any], folder: str) -> dict[str, Any]:
        """``args`` that go on from the checkpoint in ``folder``, with optimizer, scheduler and step."""


ENGINES: tuple[Engine, ...] = (megatron, deepspeed, fsdp, ddp)


def choose(command: str, args: Mapping[str, Any]) -> Engine:
    """The engine of ``command`` (``sft``, ``megatron sft``, …) with ``args``."""
    return next(engine for engine in ENGINES if engine.matches(command, args))
