"""What is wrong with a file, said so that its author can mend it: file, line, key, value and fix, all at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong. ``line`` counts from 1; 0 means that no line is known."""

    file: str
    key: str
    problem: str
    line: int = 0

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.key}: {self.problem}" if self.key else f"{where}: {self.problem}"


class ConfigError(ValueError):
    """A recipe, a cluster file or a run parameter is wrong; ``faults`` holds every fault that was found.

    Never worth a retry: the same input fails in the same way.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = list(dict.fromkeys(faults))  # a node may be named twice, by name and by label
        count = len(self.faults)
        head = "1 fault in the configuration" if count == 1 else f"{count} faults in the configuration"
        super().__init__(head + ":\n" + "\n".join(f"  {fault}" for fault in self.faults))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Fault]]]:
        return type(self), (self.faults,)


def key_text(path: tuple[str | int, ...]) -> str:
    """A key path as a user writes it: ``nodes[0].workdir``."""
    return ".".join(f"[{part}]" if isinstance(part, int) else part for part in path).replace(".[", "[")


def shorten(value: Any, width: int = 80) -> str:
    """A value for an error message: its repr, cut to ``width`` characters."""
    text = repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that ``word`` is most likely a slip of, if any is near."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def from_validation_error(
    error: ValidationError,
    file: str,
    lines: dict[tuple[str | int, ...], int],
    known: dict[tuple[str | int, ...], list[str]],
) -> list[Fault]:
    """Pydantic's errors as faults.

    Args:
        error: what pydantic raised.
        file: the file's name as the user knows it.
        lines: line number of each key path.
        known: for the path of each mapping, the keys that it may have (to propose the right one).
    """
    return [_fault(item, file, lines, known) for item in error.errors()]


def _fault(
    item: Any, file: str, lines: dict[tuple[str | int, ...], int], known: dict[tuple[str | int, ...], list[str]]
) -> Fault:
    path: tuple[str | int, ...] = tuple(item["loc"])
    key = key_text(path)
    line = next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 0)
    kind = item["type"]
    if kind == "extra_forbidden":
        choices = known.get(path[:-1], [])
        guess = nearest(str(path[-1]), choices)
        hint = f"did you mean {guess!r}?" if guess else f"known keys are {', '.join(choices)}"
        return Fault(file, key, f"unknown key (value {shorten(item['input'])}); {hint}", line)
    if kind == "missing":
        return Fault(file, key, "is missing; add it", line)
    message = str(item["msg"]).removeprefix("Value error, ")
    if message[1:2].islower():
        message = message[0].lower() + message[1:]
    return Fault(file, key, f"{message} (got {shorten(item['input'])})", line)
