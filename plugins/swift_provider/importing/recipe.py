"""Turns a pasted command line into a recipe, and says of everything that did not stay as it was why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from swift_provider.config.errors import ConfigError, Fault
from swift_provider.config.loading import parse
from swift_provider.config.recipe import OWNED_ARGUMENTS, OWNED_ENVIRONMENT, Recipe
from swift_provider.importing.commands import Training, find_training
from swift_provider.importing.shell import ShellError, commands_of
from swift_provider.planning.arguments import check_arguments
from swift_provider.planning.catalogue import Arguments, arguments_of, plain_type
from swift_provider.planning.renames import MEGATRON, SWIFT

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|API_KEY|ACCESS_KEY")
_GPUS = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_PLACES = ("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "num_nodes", "num_gpus", "rdzv")
_VALUES: Mapping[str, Mapping[str, Any]] = {
    "deepspeed": {"default-zero2": "zero2", "default-zero3": "zero3"},
    "torch_dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "AUTO": None},
    "target_modules": {"ALL": "all-linear", "DEFAULT": "all-linear", "AUTO": "all-linear"},
    "template": {"AUTO": None},
    "model_type": {"AUTO": None},
    "tuner_type": {"longlora": "lora"},
    "tuner_backend": {"swift": None},
}
_DATA_FILE = re.compile(r"\.(?:jsonl?|csv|txt|parquet)(?:#\d+)?$")


@dataclass
class Imported:
    """A recipe and what is to be said of it: ``notes`` for what was changed, ``faults`` for what is left to mend."""

    recipe: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def yaml(self) -> str:
        """The recipe as a file."""
        return yaml.safe_dump(self.recipe, allow_unicode=True, sort_keys=False, width=110)


def import_recipe(script: str, *, name: str, cluster: str) -> Imported:
    """The recipe of the training in ``script``.

    Args:
        script: a command line or a shell script with one; it is read, never run.
        name: of the recipe.
        cluster: of the recipe.

    Raises:
        ConfigError: there is no training in it.
    """
    try:
        trainings = find_training(commands_of(script))
    except ShellError as error:
        raise ConfigError([Fault("command line", "", str(error))]) from None
    if not trainings:
        known = "swift sft, megatron sft, torchrun … swift/cli/sft.py, deepspeed … swift/cli/sft.py"
        raise ConfigError([Fault("command line", "", f"holds no training; a line such as these is needed: {known}")])
    training = trainings[0]
    result = Imported({})
    same = all((one.command, one.words) == (training.command, training.words) for one in trainings)
    if len(trainings) > 1:
        what = "the same command for each node" if same else "the first command only; import the others by themselves"
        result.notes.append(f"{len(trainings)} commands found: took {what}")
    env = _environment(training, result.notes)
    _tell_launcher(training, result.notes)
    args = _arguments(training, result)
    recipe: dict[str, Any] = {"name": name, "swift": {"command": training.command, "args": args}}
    if env:
        recipe["swift"]["env"] = env
    recipe["cluster"] = cluster
    keep = result.recipe.pop("keep_last", None)
    if keep is not None:
        recipe["checkpoints"] = {"keep_last": keep}
    result.recipe = recipe
    result.faults += _check(result)
    return result


def _check(result: Imported) -> list[str]:
    faults = []
    try:
        parse(Recipe, result.yaml().replace("${", "$ {"), "recipe", {})
    except ConfigError as error:
        faults += [f"{fault.key}: {fault.problem}" for fault in error.faults]
    section = result.recipe["swift"]
    problems = check_arguments(section["command"], section["args"], arguments_of(section["command"]))
    return faults + [f"swift.args.{name}: {problem}" for name, problem in problems.items()]


def _environment(training: Training, notes: list[str]) -> dict[str, str]:
    kept = {}
    for name, value in training.environment.items():
        if name in OWNED_ENVIRONMENT or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            notes.append(f"{name}={value}: left out, it follows from the cluster")
        elif name in _GPUS:
            notes.append(f"{name}={value}: left out; say it with slots and gpus of the cluster's nodes")
        elif _SECRET.search(name.upper()):
            notes.append(f"{name}: left out, it looks like a secret; set it in the environment of the nodes")
        elif "$" in value or "`" in value:
            notes.append(f"{name}={value}: left out, nothing here says what it stands for")
        else:
            kept[name] = value
    return kept


def _tell_launcher(training: Training, notes: list[str]) -> None:
    options = training.options
    if training.launcher != "swift":
        notes.append(f"{training.launcher}: left out; the agent starts torchrun on every node")
    for name, value in options.items():
        shown = f"--{name} {value}".strip()
        if name == "hostfile":
            notes.append(f"{shown}: make the cluster of it with `swift-provider hostfile import {value or 'FILE'}`")
        elif name in ("include", "i"):
            notes.append(f"{shown}: give it to a run as parameter nodes: [{value!r}]")
        elif name in ("exclude", "e"):
            notes.append(f"{shown}: give it to a run as parameter exclude: [{value!r}]")
        elif name.startswith(_PLACES):
            notes.append(f"{shown}: left out, it follows from the cluster")
        elif name == "config_file":
            notes.append(f"{shown}: left out and not read; say what it configures with deepspeed or fsdp")


def _arguments(training: Training, result: Imported) -> dict[str, Any]:
    known = arguments_of(training.command)
    args: dict[str, Any] = {}
    for name, values in _pairs(training.words, result):
        _take(training.command, name.replace("-", "_"), values, known, args, result)
    for name in ("dataset", "val_dataset"):
        if isinstance(args.get(name), str):
            args[name] = [args[name]]
    _tell_paths(args, result)
    return args


def _pairs(words: list[str], result: Imported) -> list[tuple[str, list[str]]]:
    """``--name value value`` as ``(name, values)``; the last of several wins, as argparse has it."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            if name in found:
                result.notes.append(f"--{name}: is there twice; the last one counts")
            current = found[name] = [value] if equals else []
        elif current is None:
            problem = f"{word}: an argument file is not read" if word.endswith((".yaml", ".yml", ".json")) else word
            result.faults.append(f"{problem}; write its content into swift.args")
        else:
            current.append(word)
    return list(found.items())


def _take(command: str, name: str, values: list[str], known: Arguments, args: dict[str, Any], result: Imported) -> None:
    """Puts one argument into ``args`` under the name that it has today, or says why not."""
    if any("$" in value or "`" in value for value in values):
        result.faults.append(f"--{name} {' '.join(values)}: nothing here says what the variable stands for; fill it in")
        return
    new = (MEGATRON if command.startswith("megatron") else SWIFT).get(name) if name not in known else None
    if name == "save_total_limit" and values and values[0].isdigit():
        result.recipe["keep_last"] = max(1, int(values[0]))
        result.notes.append(f"--{name} {values[0]}: is checkpoints.keep_last here")
    elif (new or name) in OWNED_ARGUMENTS:
        result.notes.append(f"--{name} {' '.join(values)}".strip() + f": left out, {OWNED_ARGUMENTS[new or name]}")
    elif new is not None and " " in new:
        _translate(command, name, values, new, args, result)
    else:
        if new is not None:
            result.notes.append(f"--{name}: is called {new} today")
        target = new or name
        value = _value(known.get(target), values)
        mapped = _VALUES.get(target, {})
        if isinstance(value, str) and value in mapped:
            result.notes.append(f"--{name} {value}: is {target}: {mapped[value] or 'the default'} today")
            value = mapped[value]
        elif isinstance(value, list):
            value = [mapped.get(item, item) if isinstance(item, str) else item for item in value]
        if value is not None:
            args[target] = value


def _translate(command: str, name: str, values: list[str], advice: str, args: dict[str, Any], result: Imported) -> None:
    """Old arguments that became more than another name."""
    on = not values or values[0].lower() in ("true", "1", "yes")
    new: dict[str, Any]
    if name == "use_flash_attn":
        flash = {"attention_backend": "flash"} if command.startswith("megatron") else {"attn_impl": "flash_attn"}
        new = flash if on else {}
    elif name == "log_to_wandb":
        new = {"report_to": ["wandb"]} if on else {}
    elif name == "max_packed_length" and values and values[0].isdigit():
        new = {"packing": True, "packing_length": int(values[0])}
    elif name == "load_safetensors" or (name == "train_dataset_sample" and values == ["-1"]):
        new = {}
    elif name == "resume_from_checkpoint" and values:
        new = {"mcore_model": values[0], "finetune": False}
    else:
        result.faults.append(f"--{name} {' '.join(values)}".strip() + f": {advice}")
        return
    args.update(new)
    told = ", ".join(f"{key}: {value}" for key, value in new.items()) or "needed no more"
    result.notes.append(f"--{name} {' '.join(values)}".strip() + f": is {told} today")


def _value(argument: Mapping[str, Any] | None, values: list[str]) -> Any:
    """The words of an argument as the YAML value that its type asks for; a text where the type is not known."""
    kind = plain_type(argument) if argument else ""
    if kind.lower().startswith("list["):
        return [_scalar(kind[5:-1], value) for value in values]
    if not values:
        return True
    if len(values) > 1:
        return list(values)
    return _scalar(kind, values[0])


def _scalar(kind: str, text: str) -> Any:
    if kind == "int" and re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if kind == "float":
        try:
            return float(text) if not re.fullmatch(r"[+-]?\d+", text) else int(text)
        except ValueError:
            return text
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return text


def _tell_paths(args: dict[str, Any], result: Imported) -> None:
    config = args.get("deepspeed")
    if isinstance(config, str) and config.endswith(".json"):
        name = PurePosixPath(config).name
        if not config.startswith("/"):
            args["deepspeed"] = name
            result.notes.append(f"--deepspeed {config}: put {name} into include/configs/deepspeed")
    for key in ("model", "dataset", "val_dataset", "adapters", "ref_model", "reward_model", "external_plugins"):
        value = args.get(key)
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, str) or item.startswith(("/", "oss://")):
                continue
            if item.startswith(("./", "../", "~")) or _DATA_FILE.search(item):
                result.faults.append(f"--{key} {item}: write the absolute path that it has on the nodes")
