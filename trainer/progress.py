"""The step lines of ``logging.jsonl``, followed as the trainer appends them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from typing import Any, Dict, Optional, Tuple

from trainer.protocol import Progress

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([dhms])")
_CHUNK = 1 << 20  # bytes per read
_LONGEST_LINE = 16 << 20  # bytes; the summary line holds the whole history and is no step line


def parse_duration(text: Any) -> Optional[float]:
    """Seconds of ``"1d 2h"``, ``"1h 2m 3s"`` or ``"45s"``; ``None`` for anything else."""
    if not isinstance(text, str) or not re.fullmatch(r"(\s*\d+(\.\d+)?\s*[dhms])+\s*", text):
        return None
    return sum(float(amount) * _UNITS[unit] for amount, unit in _DURATION.findall(text))


def parse_step(text: Any) -> Optional[Tuple[int, int]]:
    """``(3, 6)`` of ``"3/6"``; ``None`` for anything else."""
    match = re.fullmatch(r"(\d+)/(\d+)", text) if isinstance(text, str) else None
    return (int(match.group(1)), int(match.group(2))) if match else None


def _number(row: Dict[str, Any], *names: str) -> Optional[float]:
    for name in names:
        value = row.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value - value == 0:  # no NaN, no inf
            return float(value)
    return None


def parse_row(line: str) -> Optional[Progress]:
    """The progress that one line tells, ms-swift's or Megatron's; ``None`` when it is not a step line."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    step = parse_step(row.get("global_step/max_steps")) or parse_step(row.get("iteration"))
    if step is None:
        return None
    return Progress(
        step=step[0],
        max_steps=step[1],
        epoch=_number(row, "epoch"),
        loss=_number(row, "loss", "lm loss"),
        grad_norm=_number(row, "grad_norm"),
        learning_rate=_number(row, "learning_rate"),
        eval_loss=_number(row, "eval_loss"),
        elapsed_s=parse_duration(row.get("elapsed_time")),
        remaining_s=parse_duration(row.get("remaining_time")),
        seconds_per_step=_number(row, "train_speed(s/it)"),
    )


def merge(older: Optional[Progress], newer: Progress) -> Progress:
    """``newer``, with the values that its line does not hold (a loss in an eval line) taken from ``older``."""
    if older is None:
        return newer
    known = {name: value for name, value in dataclasses.asdict(newer).items() if value is not None}
    return dataclasses.replace(older, **known)


class ProgressReader:
    """Follows one ``logging.jsonl``.

    Rows that are there when the reader is made belong to an earlier generation (a resumed run appends) and do not
    count. A file that becomes shorter or is replaced is read from its beginning.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._inode, self._offset = self._where()
        self._rest = b""
        self.progress: Optional[Progress] = None

    def _where(self) -> Tuple[int, int]:
        try:
            stat = os.stat(self._path)
        except OSError:
            return 0, 0
        return stat.st_ino, stat.st_size

    def poll(self) -> Optional[Progress]:
        """Read what was appended since the last call; the newest progress, or ``None`` before the first step."""
        inode, size = self._where()
        if inode != self._inode or size < self._offset:
            self._inode, self._offset, self._rest = inode, 0, b""
        if size > self._offset:
            self._read()
        return self.progress

    def _read(self) -> None:
        with open(self._path, "rb") as stream:
            stream.seek(self._offset)
            while True:
                data = stream.read(_CHUNK)
                if not data:
                    return
                self._offset += len(data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                if len(self._rest) > _LONGEST_LINE:
                    self._rest = b""
                for line in lines:
                    self._take(line)

    def _take(self, line: bytes) -> None:
        found = parse_row(line.decode("utf-8", "replace"))
        if found is not None:
            self.progress = merge(self.progress, found)
