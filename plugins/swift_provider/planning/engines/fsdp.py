"""PyTorch's FSDP2: weights, gradients and optimizer state in shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_provider.planning.engines import swift
from swift_provider.planning.engines.setting import Batch, Finding, Setting, argument, truth

NAME = "fsdp"
#: ms-swift's own configuration, which saves a shard per rank. What another one saves is not known here.
BUILT_IN = "fsdp2"


def matches(command: str, args: Mapping[str, Any]) -> bool:
    """A ``swift`` command with ``fsdp``."""
    return bool(args.get("fsdp"))


def complete(args: dict[str, Any], setting: Setting) -> list[Finding]:
    """See :class:`swift_provider.planning.engines.Engine`."""
    found = swift.complete(args, setting)
    value = args["fsdp"]
    if value == BUILT_IN and truth(args.get("save_only_model")):
        problem = "fsdp2 saves shards, and never without optimizer state; leave it out or use zero3"
        found.append(argument("save_only_model", f"{problem} (got true)"))
    if setting.nodes > 1 and not setting.shared:
        problem = "each node keeps its own shards only; without a shared_dir a restart cannot resume from them"
        found.append(argument("fsdp", problem, warning=True))
    return found


def batch(args: Mapping[str, Any], world_size: int) -> Batch:
    """See :class:`swift_provider.planning.engines.Engine`."""
    return swift.batch(args, world_size)


def resume(args: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """See :class:`swift_provider.planning.engines.Engine`."""
    return swift.resume(args, folder)
