"""PyTorch's DistributedDataParallel: a whole copy of the model on each GPU; what ms-swift does when nothing is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_provider.planning.engines import swift
from swift_provider.planning.engines.setting import Batch, Finding, Setting

NAME = "ddp"


def matches(command: str, args: Mapping[str, Any]) -> bool:
    """Any ``swift`` command."""
    return True


def complete(args: dict[str, Any], setting: Setting) -> list[Finding]:
    """See :class:`swift_provider.planning.engines.Engine`."""
    return swift.complete(args, setting)


def batch(args: Mapping[str, Any], world_size: int) -> Batch:
    """See :class:`swift_provider.planning.engines.Engine`."""
    return swift.batch(args, world_size)


def resume(args: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """See :class:`swift_provider.planning.engines.Engine`."""
    return swift.resume(args, folder)
