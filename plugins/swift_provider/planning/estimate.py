"""What a training needs of one GPU, and what its checkpoints weigh, from the model's ``config.json``. Pure arithmetic.

An estimate from below: what the formulas of the literature give, and nothing for fragmentation. Sources:

- ZeRO: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3:
  2 bytes of weights, 2 of gradients and 12 of Adam state per parameter, of which stage 1 shards the last, stage 2 the
  last two and stage 3 all.
- Megatron-Core, "Distributed Optimizer": 2 + 4 bytes, and 12 of Adam state shared out over the data-parallel ranks.
- Activations: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4: a
  layer keeps sbh (34 + 5as/h) bytes, 34sbh with attention recomputed (or flash attention), 2sbh with all recomputed;
  tensor parallelism divides 24 of the 34, with sequence parallelism all.
- LoRA: Hu et al. 2021: only the adapter has gradients and optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swift_provider.planning.engines.deepspeed import Zero, zero_of
from swift_provider.planning.engines.megatron import trains_adapter
from swift_provider.planning.engines.parallel import TP, Parallel
from swift_provider.planning.engines.setting import truth, whole
from swift_provider.planning.plan import LaunchPlan, MemoryEstimate, gib
from swift_provider.planning.shape import ModelShape, shape_of

#: Tokens of a sample where ``max_length`` is not set: the model's maximum is seldom what the data hold.
ASSUMED_LENGTH = 4096
#: CUDA context, cuBLAS and NCCL buffers.
CONTEXT_BYTES = 3 * 2**29
#: ZeRO-3 keeps this many gathered parameters at once (``stage3_max_live_parameters`` of ms-swift's own file).
LIVE_PARAMETERS = 10**9
#: Kinds of ``rlhf`` that hold a frozen copy of the model beside it; with a LoRA the model without it serves.
WITH_REFERENCE = ("dpo", "kto", "grpo", "ppo")
#: Kinds of ``rlhf`` whose samples are two: chosen and rejected.
IN_PAIRS = ("dpo", "orpo", "simpo", "cpo", "rm")
#: How full a GPU may be before fragmentation ends the run.
USABLE = 0.92


@dataclass(frozen=True)
class Verdict:
    """Whether an estimate fits, in words; ``advice`` names what would, if anything does."""

    fits: bool
    text: str
    advice: str = ""


@dataclass(frozen=True)
class _Bytes:
    """Per parameter that is trained: ``weights``, ``gradients``, ``optimizer``; and how many ranks share each."""

    weights: float
    gradients: float
    optimizer: float
    split_weights: int = 1
    split_gradients: int = 1
    split_optimizer: int = 1


def fits(plan: LaunchPlan, config: Mapping[str, Any], gpu_bytes: int) -> Verdict | None:
    """Whether ``plan`` fits GPUs of ``gpu_bytes``; ``None`` where nothing can be estimated."""
    memory = estimate(plan, config)
    return judge(memory, gpu_bytes) if memory else None


def judge(memory: MemoryEstimate, gpu_bytes: int) -> Verdict:
    """An estimate against a GPU; the advice is the first change that would fit, in order of what it costs."""
    usable = int(gpu_bytes * USABLE)
    text = f"about {gib(memory.total)} needed, {gib(gpu_bytes)} there"
    if memory.total <= usable:
        return Verdict(True, text)
    fitting = [f"{change} (about {gib(total)})" for change, total in memory.alternatives.items() if total <= usable]
    return Verdict(False, text, "; ".join(fitting[:3]) or "no single change is enough: take more or larger GPUs")


def estimate(plan: LaunchPlan, config: Mapping[str, Any]) -> MemoryEstimate | None:
    """Bytes on the fullest GPU, with what other choices would need; ``None`` where config or engine are not known."""
    shape = shape_of(config)
    memory = _estimate(plan, shape) if shape else None
    if shape is None or memory is None:
        return None
    alternatives = {}
    for change, other in _alternatives(plan, shape):
        changed = _estimate(other, shape)
        if changed is not None and changed.total < memory.total:
            alternatives[change] = changed.total
    return memory.model_copy(update={"alternatives": alternatives})


def steps(samples: int, global_batch: int, epochs: float) -> int:
    """Optimizer steps, as ms-swift counts them: whole batches of an epoch, at least one."""
    return math.ceil(epochs * max(1, samples // global_batch))


def checkpoint_bytes(plan: LaunchPlan, config: Mapping[str, Any]) -> int | None:
    """One checkpoint, over all nodes: what is trained, with its optimizer state unless that is left out."""
    shape = shape_of(config)
    if shape is None or plan.device == "cpu":
        return None
    whole_weights = 0 if _is_lora(plan) and plan.engine != "megatron" else 2 * shape.parameters
    adapter = 4 * _trained(plan, shape) if _is_lora(plan) else 0
    if truth(plan.args.get("save_only_model")) or truth(plan.args.get("no_save_optim")):
        return whole_weights + adapter
    sizes = _sizes(plan)
    return None if sizes is None else int(whole_weights + adapter + sizes.optimizer * _trained(plan, shape))


def _estimate(plan: LaunchPlan, shape: ModelShape) -> MemoryEstimate | None:
    if plan.device == "cpu":
        return None
    sizes = _sizes(plan)
    if sizes is None:
        return None
    parallel = _parallel(plan)
    trained, whole_model = _trained(plan, shape), float(shape.parameters)
    share = _resident(shape, parallel) / whole_model
    frozen = whole_model if _is_lora(plan) or _rlhf_type(plan) in WITH_REFERENCE else 0.0
    frozen_bytes = frozen * whole(plan.args, "quant_bits", 16) / 8
    return MemoryEstimate(
        weights=int((frozen_bytes + sizes.weights * trained) * share / sizes.split_weights),
        gradients=int(sizes.gradients * trained * share / sizes.split_gradients),
        optimizer=int(sizes.optimizer * trained * share / sizes.split_optimizer),
        activations=int(activation_bytes(plan, shape)),
        other=CONTEXT_BYTES + _gathered(plan, shape, sizes),
    )


def _sizes(plan: LaunchPlan) -> _Bytes | None:
    """Bytes per trained parameter and their sharing.

    Plain DDP with bfloat16 weights has Adam states of that type, too (``torch.optim.AdamW`` makes them like the
    parameter), without a float32 copy: 2 + 2 + 4. peft makes those of a LoRA float32, and accelerate those that FSDP2
    trains: 4 + 4 + 8.
    """
    ranks, dtype = plan.world_size, str(plan.args.get("torch_dtype", "bfloat16"))
    wide = _Bytes(4, 4, 8)
    if plan.engine == "fsdp":
        return _Bytes(4, 4, 8, ranks, ranks, ranks)
    if plan.engine == "megatron":
        sharded = (
            plan.data_parallel * _parallel(plan).context
            if truth(plan.args.get("use_distributed_optimizer", True))
            else 1
        )
        return _Bytes(2, 4, 12, split_optimizer=sharded)
    if plan.engine == "deepspeed":
        zero = zero_of(plan.args.get("deepspeed"), plan.files)
        return _zero_sizes(zero, ranks) if zero else None
    return wide if _is_lora(plan) or dtype == "float32" else _Bytes(2, 2, 4)


def _zero_sizes(zero: Zero, ranks: int) -> _Bytes:
    return _Bytes(
        weights=0 if zero.offload_weights else 2,
        gradients=2,
        optimizer=0 if zero.offload_optimizer else 12,
        split_weights=ranks if zero.stage >= 3 else 1,
        split_gradients=ranks if zero.stage >= 2 else 1,
        split_optimizer=ranks if zero.stage >= 1 else 1,
    )


def activation_bytes(plan: LaunchPlan, shape: ModelShape) -> float:
    """What the forward pass keeps for the backward pass, on the first pipeline stage, and the logits.

    The MLP's share of Korthikanti's 34 is 3h + 4 x 4h; of a gated MLP it is 3h + 8 x its width. A first stage holds as
    many micro batches as there are stages, so that pipeline parallelism saves nothing here (section 4.2.3).
    """
    parallel, args = _parallel(plan), plan.args
    length = whole(args, "max_length", ASSUMED_LENGTH)
    tokens = plan.micro_batch * length / parallel.context / whole(args, "sequence_parallel_size", 1)
    width = shape.experts_per_token * shape.expert_ffn + shape.shared_ffn if shape.experts else shape.ffn
    sequence = parallel.tensor if truth(args.get("sequence_parallel")) else 1
    kept = 10 * shape.hidden / sequence + (8 * shape.hidden + 8 * width) / parallel.tensor
    if not _recomputes_all(plan) and not _flash(plan):
        kept += 5 * shape.heads * length / parallel.tensor
    per_layer = 2 * shape.hidden / sequence if _recomputes_all(plan) else kept
    in_flight = 1 + (parallel.pipeline - 1) / (parallel.pipeline * parallel.virtual) if parallel.virtual > 1 else 1
    once = kept if _recomputes_all(plan) else 0  # the layer that is being computed again
    logits = 0 if parallel.pipeline > 1 else 8 * shape.vocabulary / parallel.tensor  # bfloat16, float32, gradient
    pair = 2 if _rlhf_type(plan) in IN_PAIRS else 1
    return pair * tokens * (shape.layers * per_layer * in_flight + once + logits)


def _rlhf_type(plan: LaunchPlan) -> str | None:
    return str(plan.args.get("rlhf_type", "dpo")) if plan.command.endswith("rlhf") else None


def _recomputes_all(plan: LaunchPlan) -> bool:
    if plan.engine == "megatron":
        return plan.args.get("recompute_granularity") == "full"
    return plan.engine == "fsdp" or truth(plan.args.get("gradient_checkpointing", True))


def _flash(plan: LaunchPlan) -> bool:
    """Attention that does not keep its scores: flash, PyTorch's own, or Megatron's recomputed one."""
    return plan.args.get("attn_impl") != "eager" and plan.args.get("attention_backend") not in ("unfused", "local")


def _gathered(plan: LaunchPlan, shape: ModelShape, sizes: _Bytes) -> int:
    """Weights that are whole for a moment where each rank owns a part."""
    if sizes.split_weights == 1 and sizes.weights:
        return 0
    live = min(shape.parameters, LIVE_PARAMETERS) if plan.engine == "deepspeed" else 2 * shape.layer
    return 2 * live


def _resident(shape: ModelShape, parallel: Parallel) -> float:
    """Parameters on the fullest rank of a replica: the experts are shared out otherwise than the rest."""
    dense = (shape.layer - shape.expert_parameters) / parallel.tensor
    experts = shape.expert_parameters / (parallel.expert * parallel.expert_tensor)
    ends = shape.embeddings / (parallel.tensor * (1 if parallel.pipeline == 1 or shape.tied else 2))
    return shape.layers / parallel.pipeline * (dense + experts) + ends + shape.hidden


def _parallel(plan: LaunchPlan) -> Parallel:
    if plan.engine == "megatron":
        return Parallel.of(plan.args)
    return Parallel(tensor=whole(plan.args, "deepspeed_autotp_size", 1))


def _is_lora(plan: LaunchPlan) -> bool:
    if plan.engine == "megatron":
        return trains_adapter(plan.args)
    return str(plan.args.get("tuner_type", "lora")) != "full"


def _trained(plan: LaunchPlan, shape: ModelShape) -> int:
    return shape.lora_parameters(whole(plan.args, "lora_rank", 8)) if _is_lora(plan) else shape.parameters


def _alternatives(plan: LaunchPlan, shape: ModelShape) -> list[tuple[str, LaunchPlan]]:
    """One change each, the cheaper first: nothing but time, then speed, then what is trained."""
    changes: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    if plan.micro_batch > 1:
        micro = "micro_batch_size" if plan.engine == "megatron" else "per_device_train_batch_size"
        changes.append((f"{micro}: 1", {}, {"micro_batch": 1}))
    if plan.engine == "megatron":
        changes.append(("recompute_granularity: full", {"recompute_granularity": "full"}, {}))
        double = 2 * _parallel(plan).tensor
        if shape.kv_heads % double == 0 and plan.data_parallel % 2 == 0:
            tensor = {TP: double, "sequence_parallel": True}
            fewer = {"data_parallel": plan.data_parallel // 2}
            changes.append((f"{TP}: {double} with sequence_parallel: true", tensor, fewer))
    else:
        changes.append(("gradient_checkpointing: true", {"gradient_checkpointing": True}, {}))
        for name in ("zero2", "zero3", "zero3_offload"):
            if plan.world_size > 1 or name.endswith("offload"):
                changes.append((f"deepspeed: {name}", {"deepspeed": name, "fsdp": None}, {"engine": "deepspeed"}))
    if not _is_lora(plan):
        changes.append(("tuner_type: lora", {"tuner_type": "lora"}, {}))
    if plan.engine != "megatron" and not plan.args.get("quant_bits"):
        qlora = {"tuner_type": "lora", "quant_method": "bnb", "quant_bits": 4}
        changes.append(("QLoRA (" + ", ".join(f"{name}: {value}" for name, value in qlora.items()) + ")", qlora, {}))
    return [(text, plan.model_copy(update={"args": {**plan.args, **args}, **more})) for text, args, more in changes]
