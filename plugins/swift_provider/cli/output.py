"""Where the command line's words go: answers to stdout, notes and faults to stderr."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table

#: What a line needs to stay one where nobody looks at a terminal.
PLAIN_WIDTH = 200


def out(text: str) -> None:
    """A line of the answer."""
    sys.stdout.write(text + "\n")


def err(text: str) -> None:
    """A note, or a fault."""
    sys.stderr.write(text + "\n")


def fail(text: str) -> NoReturn:
    """The last fault: the exit status is 1.

    Raises:
        typer.Exit: always.
    """
    err(text)
    raise typer.Exit(1)


def print_table(table: Table) -> None:
    """A table on stdout; coloured on a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH, color_system=None)
    console.print(table)
