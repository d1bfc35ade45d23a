"""What a single run may change without touching the recipe: one list for the form, the REST API and the check.

Names are ms-swift's own where they override an argument. ``None`` always means "as the recipe says".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swift_provider.config.errors import Fault, nearest, shorten
from swift_provider.config.recipe import OWNED_ARGUMENTS
from swift_provider.planning.engines import choose


@dataclass(frozen=True)
class RunParam:
    """One parameter of a run. ``schema`` is JSON schema; ``argument`` says that it overrides that ms-swift argument."""

    name: str
    title: str
    section: str
    schema: Mapping[str, Any]
    description: str = ""
    default: Any = None
    argument: bool = False
    choices: tuple[str, ...] = field(default=())


def _number(**limits: Any) -> dict[str, Any]:
    return {"type": ["null", "number"], **limits}


def _integer(**limits: Any) -> dict[str, Any]:
    return {"type": ["null", "integer"], **limits}


RUN_PARAMS: tuple[RunParam, ...] = (
    RunParam("dry_run", "Dry run", "Run", {"type": "boolean"}, "End, green, after plan and preflight.", default=False),
    RunParam(
        "nodes",
        "Nodes",
        "Run",
        {"type": ["null", "array"], "items": {"type": "string"}},
        "Names of the cluster's nodes to use, one per line. Empty: all.",
    ),
    RunParam(
        "resume_from",
        "Resume from",
        "Run",
        {"type": ["null", "string"], "pattern": "^/.+"},
        "Absolute path of a checkpoint folder on the nodes.",
    ),
    RunParam(
        "dataset",
        "Datasets",
        "Data",
        {"type": ["null", "array"], "items": {"type": "string"}, "minItems": 1},
        "Paths on the nodes, oss:// locations or hub ids, one per line; `#500` behind one takes 500 rows.",
        argument=True,
    ),
    RunParam("max_length", "Maximum length", "Data", _integer(minimum=8), "Tokens per sample.", argument=True),
    RunParam("num_train_epochs", "Epochs", "Training", _number(exclusiveMinimum=0), argument=True),
    RunParam(
        "max_steps", "Steps", "Training", _integer(minimum=1), "Optimizer steps; overrides epochs.", argument=True
    ),
    RunParam("learning_rate", "Learning rate", "Training", _number(exclusiveMinimum=0, maximum=1), argument=True),
    RunParam(
        "per_device_train_batch_size", "Micro batch", "Training", _integer(minimum=1), "Samples per GPU.", argument=True
    ),
    RunParam("gradient_accumulation_steps", "Accumulation", "Training", _integer(minimum=1), argument=True),
    RunParam(
        "save_steps", "Save every", "Checkpoints", _integer(minimum=1), "Steps between checkpoints.", argument=True
    ),
    RunParam("keep_last", "Keep last", "Checkpoints", _integer(minimum=1), "Newest checkpoints that stay."),
    RunParam(
        "prune_dry_run",
        "Prune: dry run",
        "Checkpoints",
        {"type": "boolean"},
        "Print what would be deleted and why, and delete nothing.",
        default=False,
    ),
    RunParam(
        "extra_args",
        "Further ms-swift arguments",
        "Advanced",
        {"type": ["null", "object"]},
        'A JSON object such as {"warmup_ratio": 0.05}; wins over everything else.',
    ),
)

#: What ``megatron`` commands call the arguments of a run. Accumulation follows from ``global_batch_size`` there.
MEGATRON_NAMES = {
    "max_steps": "train_iters",
    "learning_rate": "lr",
    "per_device_train_batch_size": "micro_batch_size",
}
_BY_NAME = {param.name: param for param in RUN_PARAMS}


def check_params(params: Mapping[str, Any], node_names: list[str], recipe: str) -> list[Fault]:
    """What is wrong with the parameters of a run, beyond what their JSON schema has already refused.

    Airflow accepts unknown keys in a REST request; a misspelt one would be lost without a word.
    """
    faults = []
    for name, value in params.items():
        if name not in _BY_NAME and name != "recipe":
            guess = nearest(name, _BY_NAME)
            hint = f"did you mean {guess!r}?" if guess else f"known ones are {', '.join(_BY_NAME)}"
            faults.append(Fault("run parameters", name, f"unknown parameter (value {shorten(value)}); {hint}"))
    if params.get("recipe") not in (None, recipe):
        problem = f"this DAG trains {recipe} and no other (got {shorten(params['recipe'])}); use swift_train to choose"
        faults.append(Fault("run parameters", "recipe", problem))
    for node in params.get("nodes") or []:
        if node not in node_names:
            guess = nearest(node, node_names)
            hint = f"did you mean {guess!r}?" if guess else f"the cluster has {', '.join(node_names)}"
            faults.append(Fault("run parameters", "nodes", f"no node {node!r}; {hint}"))
    for name in params.get("extra_args") or {}:
        if name in OWNED_ARGUMENTS:
            faults.append(Fault("run parameters", f"extra_args.{name}", f"leave it out, {OWNED_ARGUMENTS[name]}"))
    return faults


def override_args(command: str, args: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's ms-swift arguments with those of the run over them, by the names that ``command`` has for them."""
    is_megatron = command.startswith("megatron ")
    merged = dict(args)
    for param in RUN_PARAMS:
        if param.argument and params.get(param.name) is not None:
            name = MEGATRON_NAMES.get(param.name, param.name) if is_megatron else param.name
            merged[name] = params[param.name]
    if is_megatron and params.get("max_steps") is not None:
        merged.pop("num_train_epochs", None)  # Megatron would look at the epochs alone
    extra = params.get("extra_args") or {}
    if params.get("resume_from"):
        merged = choose(command, merged | extra).resume(merged, params["resume_from"])
    return merged | extra
