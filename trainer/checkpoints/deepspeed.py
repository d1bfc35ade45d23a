"""DeepSpeed's optimizer state, ZeRO stage 0 to 3: one folder of shards, and ``latest``, which names it.

``latest`` is written after all shards. A training that was killed while it saved left every shard at its full size and
an empty ``latest``, so neither the number nor the size of shards proves anything.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Set

from trainer.checkpoints.judgement import Files, Finding, gaps

NAME = "deepspeed"
_FOLDER = r"(global_step\d+)/.*"
_OPTIMIZER = r"{folder}/(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"
_SHARDED_MODEL = r"{folder}/(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt"
_MODEL = r"{folder}/mp_rank_(\d+)_model_states\.pt"


def matches(files: Files) -> bool:
    """Whether DeepSpeed has begun to write here."""
    return "latest" in files or bool(files.matching(_FOLDER))


def settings(files: Files) -> Dict[str, Any]:
    """DeepSpeed's configuration as ms-swift recorded it; empty when it did not."""
    value = (files.json("args.json") or {}).get("deepspeed")
    return value if isinstance(value, dict) else {}


def stage(files: Files) -> int:
    """The ZeRO stage as recorded, else as the names of the files tell."""
    recorded = settings(files).get("zero_optimization")
    if isinstance(recorded, dict) and isinstance(recorded.get("stage"), int):
        return int(recorded["stage"])
    if files.matching(_SHARDED_MODEL.format(folder=r"global_step\d+")):
        return 3
    return 2 if files.matching(_OPTIMIZER.format(folder=r"global_step\d+")) else 0


def world_size(files: Files) -> int:
    """How many ranks the shards speak of; 0 when they do not tell."""
    folder = re.escape(files.text("latest") or "") or r"global_step\d+"
    shards = _shards(files, _OPTIMIZER, folder) | _shards(files, _SHARDED_MODEL, folder)
    if not shards:
        return 0
    return (max(rank for rank, _ in shards) + 1) * (max(part for _, part in shards) + 1)


def check(files: Files, world: int) -> List[Finding]:
    """What is missing or broken for a world of ``world`` ranks."""
    found = files.need("latest", *([] if settings(files).get("scheduler") else ["scheduler.pt"]))
    if any("latest" in finding.text for finding in found):
        return found
    folder = files.text("latest") or ""
    if not files.matching(re.escape(folder) + "/.*"):
        return [*found, Finding(f"latest names {folder!r}, which is not there")]
    return found + _check_shards(files, re.escape(folder), world)


def _check_shards(files: Files, folder: str, world: int) -> List[Finding]:
    level = stage(files)
    patterns = [_OPTIMIZER] * (level >= 1) + [_SHARDED_MODEL if level == 3 else _MODEL]
    found: List[Finding] = []
    for pattern in patterns:
        paths = [match.group(0) for match in files.matching(pattern.format(folder=folder))]
        found += files.need(*paths)
        found += _missing(_shards(files, pattern, folder), pattern, 1 if pattern == _MODEL else world)
    return found


def _shards(files: Files, pattern: str, folder: str) -> Set[tuple[int, int]]:
    """(data-parallel rank, model-parallel rank) of each shard."""
    found = files.matching(pattern.format(folder=folder))
    return {(int(match.group(1)) if match.re.groups > 1 else 0, int(match.groups()[-1])) for match in found}


def _missing(shards: Set[tuple[int, int]], pattern: str, world: int) -> List[Finding]:
    what = "optimizer" if pattern == _OPTIMIZER else "model"
    parts = {part for _, part in shards} or {0}
    wanted = max(1, world // len(parts))
    lost = [
        (rank, part) for part in range(max(parts) + 1) for rank in gaps({r for r, p in shards if p == part}, wanted)
    ]
    return [Finding(f"{what} shard of rank {rank}, model part {part} is missing") for rank, part in lost]
