"""What all engines of the ``swift`` commands share: the Hugging Face trainer's arguments, arithmetic and resume."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from swift_provider.config.errors import shorten
from swift_provider.planning.engines import cpu
from swift_provider.planning.engines.setting import (
    DDP_TIMEOUT_S,
    Batch,
    Finding,
    Setting,
    argument,
    check_numbers,
    check_precision,
    check_timeout,
    truth,
    whole,
)

#: ms-swift 4.6 accumulates until a global batch of about 16 samples when nothing is said.
DEFAULT_GLOBAL_BATCH = 16
#: What ``packing`` and ``padding_free`` accept as ``attn_impl``.
FLASH = ("flash_attn", "flash_attention_2", "flash_attention_3", "flash_attention_4")
#: The kinds of ``swift rlhf`` that know packed samples.
PACKING_RLHF = ("grpo", "dpo", "kto", "gkd")
#: Those that know sequence parallelism.
SEQUENCE_RLHF = ("grpo", "dpo")
_NUMBERS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "sequence_parallel_size",
    "deepspeed_autotp_size",
)


def complete(args: dict[str, Any], setting: Setting) -> list[Finding]:
    """See :class:`swift_provider.planning.engines.Engine`."""
    args.setdefault("ddp_timeout", DDP_TIMEOUT_S)
    found = check_numbers(args, _NUMBERS)
    if setting.device == "cpu":
        found += cpu.complete(args, setting)
    return [
        *found,
        *_check_world(args, setting.world_size),
        *_check_data(args, setting.command),
        *_check_resume(args),
        *check_timeout(args),
        *_check_device(args, setting),
        *check_precision(args, setting.device),
    ]


def batch(args: Mapping[str, Any], world_size: int) -> Batch:
    """Micro batch x accumulation x replicas. As in ms-swift, accumulation by default counts ranks, not replicas."""
    micro = whole(args, "per_device_train_batch_size", 1)
    accumulation = whole(args, "gradient_accumulation_steps", math.ceil(DEFAULT_GLOBAL_BATCH / micro / world_size))
    return Batch(micro, accumulation, max(1, world_size // ranks_per_replica(args)))


def ranks_per_replica(args: Mapping[str, Any]) -> int:
    """How many ranks work on the same samples."""
    return whole(args, "sequence_parallel_size", 1) * whole(args, "deepspeed_autotp_size", 1)


def resume(args: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The trainer's own way: one argument."""
    return {**args, "resume_from_checkpoint": folder}


def _check_world(args: Mapping[str, Any], world_size: int) -> list[Finding]:
    ranks = ranks_per_replica(args)
    if world_size % ranks == 0:
        return []
    name = "sequence_parallel_size" if whole(args, "sequence_parallel_size", 1) > 1 else "deepspeed_autotp_size"
    problem = f"{world_size} GPUs cannot be split into groups of {ranks}; choose a divisor of {world_size}"
    return [argument(name, f"{problem} (got {shorten(args[name])})")]


def _check_device(args: Mapping[str, Any], setting: Setting) -> list[Finding]:
    if setting.device == "cpu" or not truth(args.get("use_cpu")):
        return []
    problem = "would train on the CPU while the GPUs are held; leave it out, or take a cluster with device: cpu"
    if args.get("fsdp"):
        problem = "excludes fsdp, which shards over GPUs; leave it out"
    return [argument("use_cpu", f"{problem} (got {shorten(args['use_cpu'])})")]


def _check_data(args: Mapping[str, Any], command: str) -> list[Finding]:
    found = []
    if truth(args.get("streaming")) and whole(args, "max_steps", 0) < 1:
        problem = "is needed with streaming: a stream has no length; set the number of optimizer steps"
        found.append(argument("max_steps", f"{problem} (got {shorten(args.get('max_steps'))})"))
    feature = next((name for name in ("packing", "padding_free") if truth(args.get(name))), None)
    if feature and args.get("attn_impl") not in FLASH:
        problem = f"{feature} needs flash attention: write attn_impl: flash_attn, or {feature}: false"
        found.append(argument("attn_impl", f"{problem} (got {shorten(args.get('attn_impl'))})"))
    kind = str(args.get("rlhf_type", "dpo"))
    if feature and command == "rlhf" and kind not in PACKING_RLHF:
        problem = f"does not work with rlhf_type {kind}, only with {', '.join(PACKING_RLHF)}; write {feature}: false"
        found.append(argument(feature, f"{problem} (got true)"))
    split = whole(args, "sequence_parallel_size", 1)
    if split > 1 and command == "rlhf" and kind not in SEQUENCE_RLHF:
        problem = f"does not work with rlhf_type {kind}, only with {', '.join(SEQUENCE_RLHF)}; leave it out"
        found.append(argument("sequence_parallel_size", f"{problem} (got {split})"))
    if feature == "packing" and truth(args.get("lazy_tokenize")):
        found.append(argument("lazy_tokenize", "excludes packing; leave it out (got true)"))
    return found


def _check_resume(args: Mapping[str, Any]) -> list[Finding]:
    if not truth(args.get("save_only_model")):
        return []
    if args.get("resume_from_checkpoint") and not truth(args.get("resume_only_model")):
        problem = "excludes resume_from_checkpoint: what is saved has no optimizer state; drop one of the two"
        return [argument("save_only_model", f"{problem} (got true)")]
    problem = "a restart begins anew: what is saved has no optimizer state"
    return [argument("save_only_model", problem, warning=True)]
