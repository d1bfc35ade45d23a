"""Writes the catalogue of the ms-swift that is installed somewhere: ``… catalogue SITE_PACKAGES``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trainer.swift_arguments import SourceError, extract, version


def main() -> int:
    """Entry point; the exit status is 2 for a wrong call and 1 for a package that cannot be read."""
    if len(sys.argv) != 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    try:
        number, commands = version(sys.argv[1]), extract(sys.argv[1])
    except SourceError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    path = Path(__file__).parent / f"ms-swift-{number}.json"
    path.write_text(dump(number, commands), encoding="utf-8")
    sys.stdout.write(f"{path}: " + ", ".join(f"{name} {len(items)}" for name, items in commands.items()) + "\n")
    return 0


def dump(number: str, commands: dict[str, dict[str, dict[str, object]]]) -> str:
    """The file's text: one argument a line, so that two versions can be compared by eye."""
    blocks = []
    for command, arguments in commands.items():
        lines = [f"   {json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in arguments.items()]
        blocks.append(f"  {json.dumps(command)}: {{\n" + ",\n".join(lines) + "\n  }")
    return f'{{"version": {json.dumps(number)}, "commands": {{\n' + ",\n".join(blocks) + "\n}}\n"


if __name__ == "__main__":
    sys.exit(main())
