"""Runs named cases and prints a table ``what | ours | peer | ratio`` with the command that repeats it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Row:
    """One figure. ``peer`` is what the same costs without this project; ``None`` where there is nothing like it."""

    what: str
    ours: float
    peer: float | None = None
    unit: str = "s"
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """``ours / peer``; below 1 we need less."""
        return self.ours / self.peer if self.peer else None


Case = Callable[[], list[Row]]


def run_cases(module: str, cases: Mapping[str, Case], description: str) -> int:
    """The command line of a benchmark: ``python -m MODULE [CASE …] [--json]``."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("case", nargs="*", help=f"one of {', '.join(cases)}; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON and no table")
    options = parser.parse_args()
    unknown = [name for name in options.case if name not in cases]
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(cases)}")
    command = f"python -m {module} {' '.join(options.case)}".strip()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left running
    rows = {name: cases[name]() for name in options.case or cases}
    if options.json:
        report = {"command": command, "machine": machine(), "measured_at": time.time()}
        cases_json = {name: [{**asdict(row), "ratio": row.ratio} for row in found] for name, found in rows.items()}
        print(json.dumps({**report, "cases": cases_json}, indent=1))
    else:
        show(command, rows)
    return 0


def machine() -> str:
    """What the figures were measured on, in a few words."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {system}, load {load}"


def show(command: str, rows: Mapping[str, list[Row]]) -> None:
    """The table."""
    table = Table("what", "ours", "peer", "ratio", "", box=None, pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    for found in rows.values():
        for row in found:
            peer = "" if row.peer is None else f"{row.peer:.2f} {row.unit}"
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            table.add_row(row.what, f"{row.ours:.2f} {row.unit}", peer, ratio, row.note)
    console = Console(width=140, file=sys.stdout)
    console.print(table)
    console.print(f"{machine()}\nrepeat with: {command}", style="dim", highlight=False)
