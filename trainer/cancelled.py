"""What users have cancelled: for each task the last try that must not start any more, the newest thousand of them.

A start can be on its way to the node, or wait for its turn on it, while the user cancels; without this memory it would
begin after its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Dict

from trainer.files import read_bytes, write_atomic
from trainer.paths import NodePaths
from trainer.protocol import Owner, dumps

KEPT = 1000


def remember(node: NodePaths, owner: Owner) -> None:
    """No try of this task up to ``owner.try_number`` may start; call it under the node's start lock."""
    known = _read(node)
    last = max(owner.try_number, known.pop(_key(owner), owner.try_number))
    known[_key(owner)] = last  # now the newest
    kept = dict(list(known.items())[-KEPT:])
    write_atomic(node.cancelled, json.dumps(kept, ensure_ascii=False).encode(), sync=True)


def is_cancelled(node: NodePaths, owner: Owner) -> bool:
    """Whether this try of its task has been cancelled."""
    last = _read(node).get(_key(owner))
    return last is not None and owner.try_number <= last


def _key(owner: Owner) -> str:
    return dumps(dataclasses.replace(owner, try_number=0))


def _read(node: NodePaths) -> Dict[str, int]:
    with contextlib.suppress(ValueError):
        known = json.loads(read_bytes(node.cancelled) or b"{}")
        if isinstance(known, dict):
            return {key: last for key, last in known.items() if isinstance(last, int)}
    return {}
