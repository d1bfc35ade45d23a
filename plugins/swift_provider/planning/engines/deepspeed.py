"""DeepSpeed ZeRO: ms-swift's own configurations by name, a file of ``include/configs/deepspeed``, or a mapping."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_provider.config.errors import shorten
from swift_provider.planning.engines import swift
from swift_provider.planning.engines.setting import Batch, Finding, Setting, argument, whole

NAME = "deepspeed"
CONFIG_FILE = "deepspeed.json"
_BUILT_IN = re.compile(r"zero(?P<stage>[0-3])(?P<offload>_offload)?")


@dataclass(frozen=True)
class Zero:
    """What a configuration shards: stage 1 the optimizer state, 2 also gradients, 3 also weights."""

    stage: int
    offload_optimizer: bool = False
    offload_weights: bool = False


def matches(command: str, args: Mapping[str, Any]) -> bool:
    """A ``swift`` command with ``deepspeed``."""
    return bool(args.get("deepspeed"))


def complete(args: dict[str, Any], setting: Setting) -> list[Finding]:
    """See :class:`swift_provider.planning.engines.Engine`."""
    found = _ship_config(args, setting) + swift.complete(args, setting)
    if args.get("fsdp"):
        found.append(argument("fsdp", f"excludes deepspeed; keep one of the two (got {shorten(args['fsdp'])})"))
    zero = zero_of(args.get("deepspeed"), setting.files)
    split = whole(args, "deepspeed_autotp_size", 1)
    if split > 1 and zero is not None and zero.stage == 3:
        found.append(argument("deepspeed_autotp_size", f"needs zero0, zero1 or zero2, not stage 3 (got {split})"))
    if split > 1 and str(args.get("tuner_type", "lora")) != "full":
        found.append(argument("deepspeed_autotp_size", f"needs tuner_type: full (got {split})"))
    return found


def batch(args: Mapping[str, Any], world_size: int) -> Batch:
    """See :class:`swift_provider.planning.engines.Engine`."""
    return swift.batch(args, world_size)


def resume(args: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """See :class:`swift_provider.planning.engines.Engine`."""
    return swift.resume(args, folder)


def zero_of(value: Any, files: Mapping[str, str]) -> Zero | None:
    """What the configuration shards; ``None`` where it lies on the nodes only."""
    if isinstance(value, str):
        named = _BUILT_IN.fullmatch(value)
        if named:
            offload = named["offload"] is not None
            return Zero(int(named["stage"]), offload, offload and named["stage"] == "3")
        text = files.get(CONFIG_FILE) if value == f"{{job_dir}}/{CONFIG_FILE}" else value
        try:
            value = json.loads(text or "")
        except ValueError:
            return None
    if not isinstance(value, Mapping):
        return None
    section = value.get("zero_optimization") or {}
    stage = section.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        return None
    return Zero(stage, _offloads(section, "offload_optimizer"), _offloads(section, "offload_param"))


def _offloads(section: Mapping[str, Any], key: str) -> bool:
    return bool((section.get(key) or {}).get("device", "none") != "none")


def _ship_config(args: dict[str, Any], setting: Setting) -> list[Finding]:
    value = args["deepspeed"]
    if not isinstance(value, str) or not value.endswith(".json") or value.startswith("/"):
        return _check_name(value)
    folder = setting.config_dir / "deepspeed" if setting.config_dir else None
    path = folder / value if folder else None
    if folder is None or path is None or Path(value).name != value or not path.is_file():
        there = sorted(found.name for found in folder.glob("*.json")) if folder else []
        problem = f"no such file in include/configs/deepspeed (got {shorten(value)}); there are: {', '.join(there)}"
        return [argument("deepspeed", problem)]
    text = path.read_text(encoding="utf-8")
    try:
        json.loads(text)
    except ValueError as error:
        return [argument("deepspeed", f"deepspeed/{value} is not JSON: {error}; mend the file")]
    setting.files[CONFIG_FILE] = text
    args["deepspeed"] = f"{{job_dir}}/{CONFIG_FILE}"
    return []


def _check_name(value: Any) -> list[Finding]:
    """ms-swift looks a word up among its own configurations and takes any other one for a path or JSON."""
    if not isinstance(value, str) or value.startswith(("/", "{")) or value.strip() in _names():
        return []
    problem = f"is none of {', '.join(_names())}, no file.json and no absolute path (got {shorten(value)})"
    return [argument("deepspeed", problem)]


def _names() -> tuple[str, ...]:
    return ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
