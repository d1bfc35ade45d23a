"""What a single run may change without touching the recipe: one list for the form, the REST API and the check.

Names are ms-swift's own where they override an argument. ``None`` always means "as the recipe says".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swift_provider.config.errors import ConfigError, Fault, nearest, shorten
from swift_provider.config.recipe import OWNED_ARGUMENTS, Recipe
from swift_provider.planning.arguments import check_arguments
from swift_provider.planning.catalogue import Arguments, arguments_of, plain_type
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
        "Nodes to use, one per line: names, labels, or `gpu2:0,1` for some GPUs. Empty: all but the spares.",
    ),
    RunParam(
        "exclude",
        "Exclude",
        "Run",
        {"type": ["null", "array"], "items": {"type": "string"}},
        "Nodes or GPUs not to use, written in the same way; a spare takes a node's place. Empty: none.",
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


def params_of(recipe: Recipe) -> tuple[RunParam, ...]:
    """Every parameter that a run of ``recipe`` takes: the common ones, then those that it makes ``overridable``.

    Raises:
        ConfigError: an overridable argument is none of ms-swift's, or is the plan's own.
    """
    known = arguments_of(recipe.swift.command)
    faults: list[Fault] = []
    more: list[RunParam] = []
    for index, name in enumerate(recipe.overridable):
        problem = _not_overridable(recipe, name, known)
        if problem:
            faults.append(Fault(f"recipes/{recipe.name}.yaml", f"overridable[{index}]", f"{name}: {problem}"))
        elif name not in _BY_NAME and name not in {param.name for param in more}:
            more.append(_argument_param(name, known[name], recipe.swift.args.get(name)))
    if faults:
        raise ConfigError(faults)
    place = next(index for index, param in enumerate(RUN_PARAMS) if param.section == "Checkpoints")
    return (*RUN_PARAMS[:place], *more, *RUN_PARAMS[place:])


def _not_overridable(recipe: Recipe, name: str, known: Arguments) -> str | None:
    if name in OWNED_ARGUMENTS:
        return f"leave it out, {OWNED_ARGUMENTS[name]}"
    problem = check_arguments(recipe.swift.command, {name: None}, known).get(name)
    return (
        None if name in known else (problem or "write it without no_ and with underscores").replace(" (value None)", "")
    )


def _argument_param(name: str, argument: Mapping[str, Any], value: Any) -> RunParam:
    """The form field of an ms-swift argument: typed as the catalogue says."""
    schema, default = _schema(argument), None
    if schema["type"] == "boolean":
        default = _as_bool(value, bool(argument["default"]))
    title = name.replace("_", " ").capitalize()
    return RunParam(name, title, "Arguments", schema, f"ms-swift's `{name}`.", default, argument=True)


def _as_bool(value: Any, default: bool) -> bool:
    return default if value is None else str(value).lower() in ("true", "yes", "t", "y", "1")


def _schema(argument: Mapping[str, Any]) -> dict[str, Any]:
    kind = plain_type(argument)
    choices = argument.get("choices")
    if choices and kind.startswith("Literal["):
        return {"type": ["null", "string"], "enum": [None, *(str(choice) for choice in choices if choice is not None)]}
    if kind == "bool":
        # A switch knows no third position, so only an argument with a default of its own gets one.
        if isinstance(argument.get("default"), bool):
            return {"type": "boolean"}
        return {"type": ["null", "string"], "enum": [None, "true", "false"]}
    if kind in ("int", "float"):
        return _integer() if kind == "int" else _number()
    if kind.lower() == "list[str]":
        return {"type": ["null", "array"], "items": {"type": "string"}}
    return {"type": ["null", "string"]}


def check_params(params: Mapping[str, Any], recipe: Recipe) -> list[Fault]:
    """What is wrong with the parameters of a run, beyond what their JSON schema has already refused.

    Airflow accepts unknown keys in a REST request; a misspelt one would be lost without a word. Which nodes there are
    is for :mod:`swift_provider.planning.selection` to tell.
    """
    faults: list[Fault] = []
    try:
        names = [param.name for param in params_of(recipe)]
    except ConfigError as error:
        faults += error.faults
        names = [*_BY_NAME, *recipe.overridable]
    for name, value in params.items():
        if name not in names and name != "recipe":
            guess = nearest(name, names)
            hint = f"did you mean {guess!r}?" if guess else f"known ones are {', '.join(names)}"
            faults.append(Fault("run parameters", name, f"unknown parameter (value {shorten(value)}); {hint}"))
    if params.get("recipe") not in (None, recipe.name):
        shown = shorten(params["recipe"])
        problem = f"this DAG trains {recipe.name} and no other (got {shown}); use swift_train to choose"
        faults.append(Fault("run parameters", "recipe", problem))
    for name in params.get("extra_args") or {}:
        if name in OWNED_ARGUMENTS:
            faults.append(Fault("run parameters", f"extra_args.{name}", f"leave it out, {OWNED_ARGUMENTS[name]}"))
    return faults


def override_args(recipe: Recipe, params: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's ms-swift arguments with those of the run over them, by the names that its command has for them."""
    command = recipe.swift.command
    is_megatron = command.startswith("megatron ")
    merged = dict(recipe.swift.args)
    names = [param.name for param in RUN_PARAMS if param.argument]
    for name in dict.fromkeys([*names, *(name for name in recipe.overridable if name not in _BY_NAME)]):
        if params.get(name) is not None:
            merged[MEGATRON_NAMES.get(name, name) if is_megatron else name] = params[name]
    if is_megatron and params.get("max_steps") is not None:
        merged.pop("num_train_epochs", None)  # Megatron would look at the epochs alone
    extra = params.get("extra_args") or {}
    if params.get("resume_from"):
        merged = choose(command, merged | extra).resume(merged, params["resume_from"])
    return merged | extra


def model_of(recipe: Recipe, params: Mapping[str, Any]) -> str:
    """The model that a run trains."""
    return str((params.get("extra_args") or {}).get("model") or recipe.swift.args["model"])
