"""Megatron-Core through ms-swift's ``megatron`` commands: tensor, pipeline, context and expert parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_provider.config.errors import shorten
from swift_provider.planning.engines.parallel import TP, Parallel, check_parallel
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

NAME = "megatron"
#: ms-swift's own default.
DEFAULT_GLOBAL_BATCH = 16
_NUMBERS = ("micro_batch_size", "global_batch_size")


def matches(command: str, args: Mapping[str, Any]) -> bool:
    """A ``megatron`` command."""
    return command.startswith("megatron ")


def complete(args: dict[str, Any], setting: Setting) -> list[Finding]:
    """See :class:`swift_provider.planning.engines.Engine`."""
    args.setdefault("ddp_timeout", DDP_TIMEOUT_S)
    if setting.device == "cpu":
        problem = "Megatron trains on GPUs only; use a swift command on a CPU cluster"
        return [Finding("swift.command", f"{problem} (got {shorten(setting.command)})")]
    found = check_numbers(args, (*_NUMBERS, *Parallel.NAMES))
    if found:
        return found
    parallel = Parallel.of(args)
    return [
        *check_parallel(args, parallel, setting.world_size, setting.shape),
        *_check_batch(args, parallel, setting.world_size),
        *_check_data(args),
        *_check_checkpoints(args, setting),
        *check_timeout(args),
        *check_precision(args, setting.device),
    ]


def batch(args: Mapping[str, Any], world_size: int) -> Batch:
    """The global batch is given; the accumulation follows from it."""
    micro = whole(args, "micro_batch_size", 1)
    replicas = max(1, world_size // Parallel.of(args).model)
    return Batch(micro, max(1, whole(args, "global_batch_size", DEFAULT_GLOBAL_BATCH) // (micro * replicas)), replicas)


def resume(args: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Megatron has no ``resume_from_checkpoint``: the checkpoint is loaded as the model, or beside it as the adapter.

    ``finetune`` is true in ms-swift and would begin at step 0 without optimizer, scheduler and random state.
    """
    left = {name: value for name, value in args.items() if name not in ("no_load_optim", "no_load_rng")}
    return {**left, "mcore_adapter" if trains_adapter(args) else "mcore_model": folder, "finetune": False}


def trains_adapter(args: Mapping[str, Any]) -> bool:
    """Whether a LoRA is trained; ms-swift turns to it by itself when it is given one."""
    given = ("adapters", "ref_adapters", "mcore_adapter", "mcore_ref_adapter")
    return str(args.get("tuner_type") or "full") != "full" or any(args.get(name) for name in given)


def _check_batch(args: Mapping[str, Any], parallel: Parallel, world_size: int) -> list[Finding]:
    if world_size % parallel.model:
        return []  # said already, and there is no number of replicas
    replicas = world_size // parallel.model
    micro, size = whole(args, "micro_batch_size", 1), whole(args, "global_batch_size", DEFAULT_GLOBAL_BATCH)
    each = micro * replicas
    if size % each:
        near = max(each, size // each * each)
        problem = (
            f"must be a multiple of micro_batch_size {micro} x data parallel {replicas} = {each}"
            f" (world size {world_size} / {parallel}); write {near} or {near + each} (got {size})"
        )
        return [argument("global_batch_size", problem)]
    rounds, stages = size // each, parallel.pipeline
    group = whole(args, "microbatch_group_size_per_vp_stage", stages)
    if parallel.virtual > 1 and (not stages <= group <= rounds or 0 < rounds % group < stages):
        problem = (
            f"gives {rounds} micro batches per step, which the interleaved pipeline cannot share out over {stages}"
            f" stages; write a multiple of {each * stages} (got {size})"
        )
        return [argument("global_batch_size", problem)]
    return []


def _check_data(args: Mapping[str, Any]) -> list[Finding]:
    found = []
    iterations, epochs = args.get("train_iters"), args.get("num_train_epochs")
    if truth(args.get("streaming")):
        if iterations is None:
            problem = "is needed with streaming: a stream has no length; set the number of optimizer steps (got None)"
            found.append(argument("train_iters", problem))
        if str(args.get("save_strategy")) == "epoch":
            found.append(argument("save_strategy", "a stream has no epochs; write steps (got 'epoch')"))
    elif iterations is None and epochs is None:
        found.append(argument("num_train_epochs", "Megatron has no default; set it, or train_iters (got None)"))
    elif iterations is not None and epochs is not None:
        problem = f"num_train_epochs ({epochs}) decides, and train_iters ({iterations}) is not looked at; drop one"
        found.append(argument("train_iters", problem, warning=True))
    if truth(args.get("group_by_length")) and (truth(args.get("padding_free", True)) or truth(args.get("packing"))):
        problem = "excludes padding_free, which is on by default; write padding_free: false (got true)"
        found.append(argument("group_by_length", problem))
    if args.get("attention_backend") == "unfused" and truth(args.get("packing")):
        problem = "packed samples need attention that knows their borders; write attention_backend: flash"
        found.append(argument("attention_backend", f"{problem} (got 'unfused')"))
    return found


def _check_checkpoints(args: Mapping[str, Any], setting: Setting) -> list[Finding]:
    found = []
    resumes = "finetune" in args and not truth(args["finetune"])
    if resumes and not (args.get("mcore_adapter") if trains_adapter(args) else args.get("mcore_model")):
        source = "mcore_adapter" if trains_adapter(args) else "mcore_model"
        found.append(argument("finetune", f"false goes on from a checkpoint: name it in {source} (got false)"))
    if truth(args.get("no_save_optim")):
        problem = "a restart begins anew: what is saved has no optimizer state; leave it out"
        if resumes:
            problem = "excludes finetune: false: what is saved could not be resumed in turn; leave it out (got true)"
        found.append(argument("no_save_optim", problem, warning=not resumes))
    elif args.get("tuner_type") == "lora_llm":
        problem = "ms-swift saves no optimizer state with lora_llm: write no_save_optim: true (a restart begins anew)"
        found.append(argument("no_save_optim", f"{problem} (got {shorten(args.get('no_save_optim'))})"))
    if setting.nodes > 1 and not setting.shared:
        problem = (
            "Megatron's nodes write and read one checkpoint together; set shared_dir to a disk they share (got None)"
        )
        found.append(Finding("shared_dir", problem, cluster=True))
    if truth(args.get("use_megatron_fsdp")):
        connections = setting.env.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if connections == "1":
            problem = 'Megatron-FSDP needs more than 1, and ms-swift sets 1; write "32"'
            found.append(Finding("swift.env.CUDA_DEVICE_MAX_CONNECTIONS", f"{problem} (got {connections})"))
    if truth(args.get("tp_comm_overlap")) and not (truth(args.get("sequence_parallel")) and whole(args, TP, 1) > 1):
        problem = f"needs sequence_parallel: true and {TP} above 1; leave it out (got true)"
        found.append(argument("tp_comm_overlap", problem))
    return found
