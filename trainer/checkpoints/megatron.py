"""Megatron's own checkpoints, as ms-swift writes them: ``iter_<step>`` inside ``checkpoint-<step>``.

``latest_checkpointed_iteration.txt`` is written before an asynchronous save has finished and proves nothing by itself;
``metadata.json`` is written when all shards are done.
"""

from __future__ import annotations

from typing import List, Optional

from trainer.checkpoints import distributed, weights
from trainer.checkpoints.judgement import Files, Finding

NAME = "megatron"
_TRACKER = "latest_checkpointed_iteration.txt"


def matches(files: Files) -> bool:
    """Whether Megatron has begun to write here."""
    return _TRACKER in files or bool(files.matching(r"iter_\d{7}/.*"))


def saves_state(files: Files) -> bool:
    """Whether the run saves what a resume needs, as ms-swift recorded it."""
    return not (files.json("args.json") or {}).get("no_save_optim", False)


def check(files: Files, step: int) -> List[Finding]:
    """What is missing or broken at ``step``."""
    found = files.need("args.json", _TRACKER)
    if not found and files.text(_TRACKER) != str(step):
        found.append(Finding(f"{_TRACKER} says {files.text(_TRACKER)!r}, not {step}"))
    folder = f"iter_{step:07d}"
    if saves_state(files):
        found += files.need(f"{folder}/common.pt", f"{folder}/metadata.json")
        found += distributed.check(files, folder)
    return found + _check_weights(files)


def _check_weights(files: Files) -> List[Finding]:
    which: Optional[str] = weights.kind(files)
    wanted = bool((files.json("args.json") or {}).get("save_safetensors"))
    if which is None and wanted:
        return [Finding("the safetensors files are missing")]
    return weights.check(files, which) if which is not None else []
