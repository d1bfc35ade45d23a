"""The supervisor's own log: one line for what happened, and once for what keeps going wrong."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Iterator, Set

_said: Set[str] = set()


def say(text: str) -> None:
    """One line with the time for the supervisor's own log; lost where the disk is full."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with contextlib.suppress(OSError):
        print(stamp, text, file=sys.stderr, flush=True)  # noqa: T201 - stderr is the supervisor's log


@contextlib.contextmanager
def complaints(what: str) -> Iterator[None]:
    """Write an error of the block to the supervisor's log, once, and go on: the training matters more."""
    try:
        yield
    except Exception as error:
        text = f"{what}: {error!r}"
        if text not in _said:
            _said.add(text)
            say(text)
