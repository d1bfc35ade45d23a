"""What the judge says, and the view of a checkpoint's files that each format looks at."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Set

from trainer.protocol import CheckpointListing, FileEntry


@dataclass(frozen=True)
class Judgement:
    """The verdict (one of :class:`~trainer.protocol.Verdict`) on the checkpoint ``name`` and why.

    ``format`` names the parts, as in ``full+deepspeed`` or ``adapter+ddp``. ``metrics`` are those of this very step.
    ``reason`` is one line for a human: what is missing or broken, or what was found.
    """

    name: str
    verdict: str
    format: str
    step: Optional[int] = None
    epoch: Optional[float] = None
    world_size: Optional[int] = None
    metrics: Dict[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Finding:
    """One fault. ``damaged``: the file is there but cannot be whole; otherwise it is missing."""

    text: str
    damaged: bool = False


class Files:
    """The files of one checkpoint, with the questions that formats ask."""

    def __init__(self, listing: CheckpointListing) -> None:
        self.name = listing.name
        self._entries: Dict[str, FileEntry] = {entry.path: entry for entry in listing.files}

    def __contains__(self, path: str) -> bool:
        return path in self._entries

    def matching(self, pattern: str) -> List[re.Match[str]]:
        """The matches of the whole path with ``pattern``, by path."""
        found = (re.fullmatch(pattern, path) for path in sorted(self._entries))
        return [match for match in found if match]

    def text(self, path: str) -> Optional[str]:
        """The content of one of the small files, without blanks around it; ``None`` when missing or not read."""
        entry = self._entries.get(path)
        return entry.text.strip() if entry is not None and entry.text is not None else None

    def json(self, path: str) -> Optional[Dict[str, Any]]:
        """The JSON object in one of the small files; ``None`` when there is none."""
        try:
            value = json.loads(self.text(path) or "")
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def need(self, *paths: str) -> List[Finding]:
        """A finding for each of the files that is missing, empty or has a broken header."""
        return [finding for finding in map(self._check, paths) if finding is not None]

    def _check(self, path: str) -> Optional[Finding]:
        entry = self._entries.get(path)
        if entry is None:
            return Finding(f"{path} is missing")
        if entry.size == 0:
            return Finding(f"{path} is empty", damaged=True)
        if entry.header_ok is False:
            return Finding(f"{path} is truncated or not a safetensors file", damaged=True)
        return None


def gaps(numbers: Set[int], count: int) -> List[int]:
    """Which of ``0 … count - 1`` are not in ``numbers``."""
    return [number for number in range(count) if number not in numbers]
