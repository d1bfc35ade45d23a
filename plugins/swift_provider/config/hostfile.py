"""DeepSpeed's two notations for nodes and GPUs, by its own rules: the hostfile and ``--include``/``--exclude``.

Where ``deepspeed`` trains on one node without a word (no hostfile) or drops what it cannot read, this refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_LINE = re.compile(r"^(\S+)\s+slots=(\d+)")
_PARTS = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<host>[^@:\s]+)(?::(?P<port>\d+))?")


@dataclass(frozen=True)
class Host:
    """One entry of a hostfile. ``text`` is its first word as it is written; ``line`` counts from 1."""

    text: str
    slots: int
    line: int
    host: str
    user: str = ""
    port: int | None = None

    @property
    def name(self) -> str:
        """What the node is called here: the host, and the port where one is written."""
        return self.host if self.port is None else f"{self.host}-{self.port}"

    def fill(self, template: str) -> str:
        """``template`` with ``{host}``, ``{user}``, ``{port}`` and ``{name}`` of this entry.

        Raises:
            ValueError: it holds another field.
        """
        values = {"host": self.host, "user": self.user, "port": str(self.port or 22), "name": self.name}
        try:
            return template.format_map(values)
        except (KeyError, IndexError, ValueError, AttributeError):
            known = ", ".join(f"{{{name}}}" for name in values)
            raise ValueError(f"is not a template; it may hold {known} (got {template!r})") from None


def parse_hostfile(text: str) -> list[Host]:
    """The entries of a hostfile, in its order.

    A line counts when it matches ``^(\\S+)\\s+slots=(\\d+)`` once its ends are stripped; what follows is ignored, and
    so are blank lines and lines that begin with ``#``.

    Raises:
        ValueError: with every bad line and its number.
    """
    hosts: list[Host] = []
    problems = []
    # As a file is iterated: at line feeds and carriage returns only, not at every break that Unicode knows.
    for number, raw in enumerate(re.split(r"\r\n|\n|\r", text), 1):
        line = raw.strip()
        if line == "" or line.startswith("#"):
            continue
        match = _LINE.search(line)
        if match is None:
            problems.append(f'line {number}: bad entry {line!r}; write "host slots=8"')
            continue
        twice = next((host for host in hosts if host.text == match[1]), None)
        if twice:
            problems.append(f"line {number}: {match[1]} is there twice (first in line {twice.line})")
            continue
        host = _host(match[1], int(match[2]), number)
        if isinstance(host, str):
            problems.append(host)
        else:
            hosts.append(host)
    if not hosts and not problems:
        problems.append('is empty; write lines such as "host slots=8"')
    if problems:
        raise ValueError("; ".join(problems))
    return hosts


def _host(text: str, slots: int, line: int) -> Host | str:
    parts = _PARTS.fullmatch(text)
    if parts is None:
        return f"line {line}: {text} is no host; write host, user@host or host:port"
    if slots < 1:
        return f"line {line}: {text} has no slots; leave the line out"
    return Host(text, slots, line, parts["host"], parts["user"] or "", int(parts["port"]) if parts["port"] else None)


@dataclass(frozen=True)
class Pick:
    """One part of a selection: a node, and which of its slots; ``None`` are all."""

    name: str
    slots: tuple[int, ...] | None = None


def parse_selection(entries: str | Iterable[str]) -> list[Pick]:
    """``"h1@h2:0,2"``, or a list of such texts; a node that is there twice has the slots of both,
    all of them when one of the two names no slots.

    Raises:
        ValueError: a part is not ``name`` or ``name:slot,slot``.
    """
    texts = [entries] if isinstance(entries, str) else list(entries)
    found: dict[str, set[int]] = {}
    whole: set[str] = set()
    for part in [part.strip() for text in texts for part in str(text).split("@")]:
        name, colon, slots = part.partition(":")
        if not name or (colon and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", slots, re.ASCII)):
            raise ValueError(f"{part!r} is no selection; write names, or host:0,2 for some GPUs, joined by @")
        found.setdefault(name, set()).update(int(slot) for slot in slots.split(",") if colon)
        whole |= set() if colon else {name}
    return [Pick(name, None if name in whole else tuple(sorted(slots))) for name, slots in found.items()]
