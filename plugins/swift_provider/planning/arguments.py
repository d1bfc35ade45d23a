"""A recipe's arguments against those that ms-swift takes: unknown names, renamed ones, values of another type. Pure.

ms-swift itself refuses an unknown argument only after half a minute, on every rank, on a GPU that is held for it; and
argparse silently takes an abbreviation for the real name. Here both are faults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from swift_provider.config.errors import nearest, shorten
from swift_provider.planning.catalogue import Arguments, plain_type
from swift_provider.planning.renames import explain

_TRUTH = frozenset({"true", "false", "yes", "no", "t", "f", "y", "n", "1", "0"})


def check_arguments(command: str, args: Mapping[str, Any], known: Arguments) -> dict[str, str]:
    """What is wrong with ``args``: name → problem and fix, in the order of ``args``.

    Args:
        command: ``sft``, ``megatron sft``, …
        args: ms-swift arguments without dashes.
        known: the catalogue of the command.
    """
    problems = {}
    for name, value in args.items():
        problem = _check_one(command, name, value, known)
        if problem:
            problems[name] = problem
    return problems


def _check_one(command: str, name: str, value: Any, known: Arguments) -> str | None:
    argument = known.get(name) or known.get(name.replace("-", "_"))
    if argument is None and name.startswith("no_"):
        # argparse makes --no_x for a switch that is on by default.
        positive = known.get(name[3:])
        argument = positive if positive and positive.get("default") is True else None
    if argument is None:
        return _unknown(command, name, value, known)
    wanted = _mismatch(argument, value)
    return f"must be {wanted} (got {shorten(value)})" if wanted else None


def _unknown(command: str, name: str, value: Any, known: Arguments) -> str:
    renamed = explain(command, name)
    if renamed:
        return f"{renamed} (value {shorten(value)})"
    longer = sorted(other for other in known if other.startswith(name))
    if len(longer) == 1:
        return f"{command} has no such argument; write the whole name: {longer[0]}"
    guess = nearest(name, known)
    hint = f"did you mean {guess!r}?" if guess else "see `swift " + command + " --help`"
    return f"{command} has no such argument (value {shorten(value)}); {hint}"


def _mismatch(argument: Mapping[str, Any], value: Any) -> str | None:
    """What the value should have been; ``None`` when it is fine or the type is beyond a plain check."""
    text = plain_type(argument)
    if value is None:
        return None
    if text.startswith("Literal[") and argument.get("choices"):
        choices = argument["choices"]
        return None if value in choices or str(value) in map(str, choices) else f"one of {', '.join(map(str, choices))}"
    checks = {"int": _is_int, "float": _is_float, "bool": _is_bool, "str": _is_scalar}
    wanted = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
    return None if text not in checks or checks[text](value) else wanted[text]


def _is_int(value: Any) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"[+-]?\d+", value.strip()) is not None
    return isinstance(value, int) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    if isinstance(value, str):  # YAML reads 1e-4 as a text, and ms-swift reads that text as a number
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(value).lower() in _TRUTH


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (str, int, float, bool))
