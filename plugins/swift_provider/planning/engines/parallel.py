"""How Megatron shares a model out over GPUs, and which numbers go together. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from swift_provider.planning.engines.setting import Finding, argument, truth, whole
from swift_provider.planning.shape import ModelShape

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"


@dataclass(frozen=True)
class Parallel:
    """The sizes of Megatron's groups."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1

    NAMES: ClassVar[tuple[str, ...]] = (TP, PP, CP, EP, ETP, VPP)

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Parallel:
        """The sizes that ``args`` set; 1 for each that they do not."""
        return cls(*(whole(args, name, 1) for name in cls.NAMES))

    @property
    def model(self) -> int:
        """GPUs of one replica."""
        return self.tensor * self.pipeline * self.context

    @property
    def experts(self) -> int:
        """GPUs of one replica of the experts."""
        return self.expert_tensor * self.expert * self.pipeline

    def __str__(self) -> str:
        return f"(TP {self.tensor} x PP {self.pipeline} x CP {self.context})"


def check_parallel(
    args: Mapping[str, Any], parallel: Parallel, world_size: int, shape: ModelShape | None
) -> list[Finding]:
    """Sizes that do not divide what they must divide: the world, and the model where its shape is known."""
    found = []
    if world_size % parallel.model:
        found.append(argument(_largest(parallel), _not_divisible(world_size, parallel.model, str(parallel))))
    if world_size % parallel.experts:
        product = f"(ETP {parallel.expert_tensor} x EP {parallel.expert} x PP {parallel.pipeline})"
        found.append(argument(EP, _not_divisible(world_size, parallel.experts, product)))
    if parallel.virtual > 1 and parallel.pipeline < 2:
        found.append(argument(VPP, f"needs {PP} from 2 on; leave it out (got {parallel.virtual})"))
    for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        if args.get(name) is not None and parallel.pipeline < 2:
            found.append(argument(name, f"needs {PP} from 2 on; leave it out (got {args[name]})"))
    if shape is not None:
        found += check_shape(args, parallel, shape)
    elif parallel.expert > 1 and parallel.tensor > 1:
        found += _check_sequence(args, parallel)
    return found


def check_shape(args: Mapping[str, Any], parallel: Parallel, shape: ModelShape) -> list[Finding]:
    """The model's own numbers against the sizes."""
    found = []
    if shape.heads % parallel.tensor:
        found.append(
            argument(TP, f"the model's {shape.heads} attention heads are not divisible (got {parallel.tensor})")
        )
    elif shape.kv_heads % parallel.tensor:
        problem = f"the model's {shape.kv_heads} key-value heads are not divisible; write a divisor of {shape.kv_heads}"
        found.append(argument(TP, f"{problem} (got {parallel.tensor})"))
    found += _check_layers(args, parallel, shape)
    if parallel.expert > 1 and not shape.experts:
        found.append(argument(EP, f"the model has no experts; leave it out (got {parallel.expert})"))
    elif shape.experts and shape.experts % parallel.expert:
        problem = f"the model's {shape.experts} experts are not divisible; write a divisor of {shape.experts}"
        found.append(argument(EP, f"{problem} (got {parallel.expert})"))
    if shape.experts and parallel.tensor > 1:
        found += _check_sequence(args, parallel)
    return found


def _check_sequence(args: Mapping[str, Any], parallel: Parallel) -> list[Finding]:
    if truth(args.get("sequence_parallel")):
        return []
    problem = f"experts with {TP} {parallel.tensor} train only with sequence_parallel: true (got false)"
    return [argument("sequence_parallel", problem)]


def _check_layers(args: Mapping[str, Any], parallel: Parallel, shape: ModelShape) -> list[Finding]:
    if args.get("pipeline_model_parallel_layout"):
        return []  # it says which stage gets what
    layers, stages = shape.layers, parallel.pipeline
    layers += sum(truth(args.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))
    for end in ("first", "last"):
        own = whole(args, f"decoder_{end}_pipeline_num_layers", 0)
        layers, stages = layers - own, stages - bool(own)
    parts = stages * parallel.virtual
    if layers < 0 or (parts and layers % parts) or (not parts and layers):
        problem = (
            f"{layers} of the model's {shape.layers} layers are left for {stages} stages x VPP {parallel.virtual};"
            " choose divisors, or set decoder_first_pipeline_num_layers / decoder_last_pipeline_num_layers"
        )
        return [argument(PP, f"{problem} (got {parallel.pipeline})")]
    return []


def _largest(parallel: Parallel) -> str:
    sizes = {TP: parallel.tensor, PP: parallel.pipeline, CP: parallel.context}
    return max(sizes, key=lambda name: sizes[name])


def _not_divisible(world_size: int, product: int, text: str) -> str:
    fits = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return (
        f"{world_size} GPUs are not divisible by {product} {text}; the product must be one of"
        f" {', '.join(map(str, fits))}, or change the nodes (got {product})"
    )
