"""What a run will take: steps, tokens, disk, hours and money. Pure arithmetic; what is not known is said to be unknown.

- tokens <= steps x global batch x max_length: samples are at most that long, and shorter ones are padded or packed.
- disk: every checkpoint of a run stays until ``prune``, after the training: steps / save_steps of them.
- hours = steps x seconds per step. A step's time is measured, never guessed: in the last good run of the same recipe on
  as many GPUs with the same global batch, or as the recipe says.
- cost = hours x nodes x price of a node per hour. A node's price is paid for all its GPUs, also for those left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from swift_provider.config.cluster import Cluster
from swift_provider.config.recipe import Recipe
from swift_provider.config.values import StrictModel
from swift_provider.planning.engines.setting import whole
from swift_provider.planning.estimate import checkpoint_bytes
from swift_provider.planning.plan import LaunchPlan, gib

#: ms-swift's own defaults.
DEFAULT_SAVE_STEPS = 500
#: What a result of the train task must agree in, so that its speed says something about this run.
COMPARED = ("recipe", "world_size", "global_batch")


class Forecast(StrictModel):
    """Steps, tokens (at most), bytes of a checkpoint and of all of them per node, seconds, money; ``None``: unknown."""

    steps: int | None = None
    tokens: int | None = None
    checkpoint_bytes: int | None = None
    checkpoints: int | None = None
    disk_bytes: int | None = None
    seconds: float | None = None
    cost: float | None = None
    lines: list[str] = Field(default_factory=list, description="the same in words, with the arithmetic")


def comparable(result: Any, plan: LaunchPlan) -> Mapping[str, Any] | None:
    """The result of an earlier train task, if its speed says something about ``plan``."""
    if not isinstance(result, Mapping) or not isinstance(result.get("seconds_per_step"), (int, float)):
        return None
    same = all(result.get(name) == getattr(plan, name) for name in COMPARED)
    return result if same and result["seconds_per_step"] > 0 else None


def forecast(
    plan: LaunchPlan,
    recipe: Recipe,
    cluster: Cluster,
    model_config: Mapping[str, Any] | None = None,
    last_result: Any = None,
) -> Forecast:
    """What ``plan`` will take.

    Args:
        plan: of the run.
        recipe: may name ``seconds_per_step``.
        cluster: may name ``price_per_hour``.
        model_config: the model's ``config.json``, where it is at hand.
        last_result: what the train task of the last good run of this DAG returned, if any.
    """
    last = comparable(last_result, plan)
    lines: list[str] = []
    steps, tokens = _steps(plan, last, lines)
    size, count, disk = _disk(plan, steps, model_config, lines)
    seconds = _seconds(recipe, steps, last, lines)
    cost = _cost(plan, cluster, seconds, lines)
    return Forecast(
        steps=steps,
        tokens=tokens,
        checkpoint_bytes=size,
        checkpoints=count,
        disk_bytes=disk,
        seconds=seconds,
        cost=cost,
        lines=lines,
    )


def _steps(plan: LaunchPlan, last: Mapping[str, Any] | None, lines: list[str]) -> tuple[int | None, int | None]:
    name = "train_iters" if plan.engine == "megatron" else "max_steps"
    steps, source = whole(plan.args, name, 0), name
    if not steps and last is not None and isinstance(last.get("steps_of_data"), int):
        steps, source = last["steps_of_data"], "as the last good run"
    if not steps:
        lines.append(f"steps unknown: they follow from the dataset's length ({name} would set them)")
        return None, None
    length = whole(plan.args, "max_length", 0)
    told = f"steps {steps:,} ({source}) = {steps * plan.global_batch:,} samples"
    if not length:
        lines.append(f"{told}; tokens unknown without max_length")
        return steps, None
    tokens = steps * plan.global_batch * length
    lines.append(f"{told} = at most {tokens:,} tokens (max_length {length})")
    return steps, tokens


def _disk(
    plan: LaunchPlan, steps: int | None, model_config: Mapping[str, Any] | None, lines: list[str]
) -> tuple[int | None, int | None, int | None]:
    size = checkpoint_bytes(plan, model_config) if model_config is not None else None
    every = whole(plan.args, "save_steps", DEFAULT_SAVE_STEPS)
    by_epoch = str(plan.args.get("save_strategy")) == "epoch"
    count = None if steps is None or by_epoch else math.ceil(steps / every)
    if size is None or model_config is None:
        lines.append("checkpoint size unknown: the model's config.json cannot be read here, or is of an unknown kind")
        return None, count, None
    if plan.shared or len(plan.nodes) == 1:
        each, where = size, "on the shared disk" if plan.shared else f"on {plan.nodes[0].name}"
    else:  # each node writes the weights, and the optimizer state of its own ranks
        weights = checkpoint_bytes(
            plan.model_copy(update={"args": {**plan.args, "save_only_model": True}}), model_config
        )
        whole_weights = weights or 0
        sharded = plan.engine in ("deepspeed", "fsdp")
        each = whole_weights + (size - whole_weights) // (len(plan.nodes) if sharded else 1)
        where = "on each node"
    told = f"checkpoint {gib(size)}"
    if count is None:
        lines.append(f"{told}, {gib(each)} {where}; how many there will be is unknown")
        return size, None, None
    lines.append(f"{told}; {count} until prune (every {every} steps) = {gib(each * count)} {where}")
    return size, count, each * count


def _seconds(recipe: Recipe, steps: int | None, last: Mapping[str, Any] | None, lines: list[str]) -> float | None:
    if recipe.seconds_per_step is not None:
        speed, source = recipe.seconds_per_step, "seconds_per_step of the recipe"
    elif last is not None:
        speed, source = float(last["seconds_per_step"]), "measured in the last good run"
    else:
        why = "no good run with these GPUs and this batch yet, and the recipe has no seconds_per_step"
        lines.append(f"hours unknown: {why}")
        return None
    if steps is None:
        lines.append(f"hours unknown: {speed:g} s per step ({source}), but how many steps is unknown")
        return None
    lines.append(f"hours {steps * speed / 3600:.2f} = {steps:,} steps x {speed:g} s ({source})")
    return steps * speed


def _cost(plan: LaunchPlan, cluster: Cluster, seconds: float | None, lines: list[str]) -> float | None:
    if cluster.price_per_hour is None:
        lines.append("cost unknown: the cluster has no price_per_hour")
        return None
    price = f"{len(plan.nodes)} nodes x {cluster.price_per_hour:g} {cluster.currency}/h"
    if seconds is None:
        lines.append(f"cost unknown: {price}, but how many hours is unknown")
        return None
    cost = seconds / 3600 * len(plan.nodes) * cluster.price_per_hour
    lines.append(f"cost {cost:,.2f} {cluster.currency} = {price} x {seconds / 3600:.2f} h")
    return cost
