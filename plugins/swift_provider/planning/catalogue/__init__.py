"""Which arguments each command of the pinned ms-swift takes: extracted from its source, versioned in this folder.

python -m swift_provider.planning.catalogue SITE_PACKAGES    # writes ms-swift-<version>.json here
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

#: The version that recipes are checked against; nodes with another one are asked for their own catalogue.
PINNED_VERSION = "4.6.0"

#: name → ``{"type", "choices"?, "default"?, "required"?}``
Arguments = Mapping[str, Mapping[str, Any]]

_OPTIONAL = re.compile(r"^(?:typing\.)?Optional\[(?P<inner>.+)\]$")


def plain_type(argument: Mapping[str, Any]) -> str:
    """The type of an argument's value when it has one: ``int`` for ``Optional[int]`` and ``int | None``."""
    text = str(argument["type"])
    inner = _OPTIONAL.match(text)
    return inner["inner"] if inner else text.removesuffix(" | None")


@cache
def arguments_of(command: str, version: str = PINNED_VERSION) -> Arguments:
    """The arguments of ``command`` (``sft``, ``megatron sft``, …) in ms-swift ``version``.

    Raises:
        FileNotFoundError: there is no catalogue of that version here.
        KeyError: ms-swift has no such command.
    """
    text = resources.files(__package__).joinpath(f"ms-swift-{version}.json").read_text(encoding="utf-8")
    commands: dict[str, Arguments] = json.loads(text)["commands"]
    return commands[command]
