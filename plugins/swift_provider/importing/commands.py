"""Finds the training in the commands of a script: which ms-swift command it is, and with which arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from swift_provider.importing.shell import Command

#: Options of launchers that take no value; every other one takes the next word.
_LAUNCHER_FLAGS = frozenset(
    (
        "module",
        "m",
        "no_python",
        "no_local_rank",
        "no_ssh",
        "no_ssh_check",
        "force_multi",
        "save_pid",
        "bind_cores_to_rank",
        "standalone",
        "elastic_training",
        "enable_elastic_training",
        "run_path",
        "multi_gpu",
        "use_deepspeed",
        "use_fsdp",
        "cpu",
        "debug",
        "quiet",
        "u",
    )
)
_LAUNCHERS = {"torchrun": "torchrun", "deepspeed": "deepspeed", "deepspeed.py": "deepspeed", "ds": "deepspeed"}
_LAUNCHER_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate",
}
_METHODS = ("sft", "pt", "rlhf")
_OLD_SCRIPTS = {"llm_sft": "sft", "llm_pt": "pt", "llm_dpo": "rlhf", "llm_rlhf": "rlhf"}


@dataclass
class Training:
    """A training that was found. ``options`` are the launcher's own, by name without dashes."""

    command: str
    words: list[str]
    environment: dict[str, str]
    launcher: str = "swift"
    options: dict[str, str] = field(default_factory=dict)


def find_training(commands: list[Command]) -> list[Training]:
    """Every training among ``commands``, in order."""
    found = (_training(command) for command in commands)
    return [training for training in found if training is not None]


def _training(command: Command) -> Training | None:
    words = list(command.words)
    while words:
        program = PurePosixPath(words[0]).name
        if program in ("swift", "megatron") and len(words) > 1 and words[1] in _METHODS:
            name = words[1] if program == "swift" else f"megatron {words[1]}"
            return Training(name, words[2:], command.environment)
        if re.fullmatch(r"python[\d.]*", program):
            return _python(words[1:], command.environment)
        if program in _LAUNCHERS:
            return _launched(_LAUNCHERS[program], words[1:], command.environment)
        if program == "accelerate" and words[1:2] == ["launch"]:
            return _launched("accelerate", words[2:], command.environment)
        words = words[1:]  # srun, numactl, a container's command line: what matters comes after it
    return None


def _python(words: list[str], environment: Mapping[str, str]) -> Training | None:
    while words and words[0].startswith("-") and words[0] != "-m":
        words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        if words[1] in _LAUNCHER_MODULES:
            return _launched(_LAUNCHER_MODULES[words[1]], words[2:], environment)
        return _entry(words[1], words[2:], environment, "python", {})
    return _entry(words[0], words[1:], environment, "python", {}) if words else None


def _launched(launcher: str, words: list[str], environment: Mapping[str, str]) -> Training | None:
    options: dict[str, str] = {}
    while words and words[0].startswith("-"):
        name, equals, value = words[0].lstrip("-").partition("=")
        words = words[1:]
        name = name.replace("-", "_")
        if not equals and name not in _LAUNCHER_FLAGS and words:
            value, words = words[0], words[1:]
        options[name] = value
    return _entry(words[0], words[1:], environment, launcher, options) if words else None


def _entry(
    target: str, words: list[str], environment: Mapping[str, str], launcher: str, options: dict[str, str]
) -> Training | None:
    """The training that a script or module of ms-swift stands for."""
    parts = re.split(r"[/.]", target.removesuffix(".py"))
    program, name = parts[-1], parts[-1]
    if name in ("main", "train", "swift", "megatron", "_swift") and words[:1] and words[0] in _METHODS:
        name, words = words[0], words[1:]
    name = _OLD_SCRIPTS.get(name, name)
    if name not in _METHODS:
        return None
    megatron = any("megatron" in part for part in parts) or program == "megatron"
    return Training(f"megatron {name}" if megatron else name, words, dict(environment), launcher, options)
