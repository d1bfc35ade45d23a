"""The one judge of completeness: resume, backup, prune and promotion ask it. It looks at listings, never at a disk."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Dict, List, Optional

from trainer.checkpoints import ddp, deepspeed, fsdp, megatron, weights
from trainer.checkpoints.judgement import Files, Finding, Judgement, gaps
from trainer.protocol import CheckpointListing, Verdict

_STATE = "trainer_state.json"
_STATES = (deepspeed, fsdp, ddp)  # the forms of optimizer state; the first that matches counts


def step_of(name: str) -> Optional[int]:
    """The step of ``checkpoint-<step>``; ``None`` for any other name."""
    match = re.fullmatch(r"checkpoint-(\d{1,12})", name)
    return int(match.group(1)) if match else None


def judge(listing: CheckpointListing) -> Judgement:
    """Say whether a checkpoint is whole. The listing is what all nodes hold together: merge the nodes' own first.

    A faulty file counts as damage only when the trainer had finished the checkpoint; before that it is incomplete, and
    perhaps still being written.
    """
    step = step_of(listing.name)
    if step is None:
        return Judgement(listing.name, Verdict.INCOMPLETE, "unknown", reason="not a checkpoint-<step> folder")
    files = Files(listing)
    if megatron.matches(files):
        return _judge_megatron(files, step)
    return _judge_trainer(files, step)


def _judge_megatron(files: Files, step: int) -> Judgement:
    found = megatron.check(files, step)
    finished = f"iter_{step:07d}/metadata.json" in files
    recorded = _recorded_world(files)
    base = Judgement(files.name, "", megatron.NAME, step, world_size=recorded or None)
    good = Verdict.COMPLETE if megatron.saves_state(files) else Verdict.WEIGHTS_ONLY
    return _conclude(base, found, finished, good)


def _judge_trainer(files: Files, step: int) -> Judgement:
    state = files.json(_STATE)
    found = _check_trainer_state(files, state, step)
    finished = not found
    which = weights.kind(files)
    form = next((form for form in _STATES if form.matches(files)), None)
    if which is None:  # even where shards hold the model, its config.json or adapter_config.json is beside them
        found.append(Finding("no weights were found" if form else "no weights and no optimizer state were found"))
    if which is not None and _weights_are_wanted(files, which, form):
        found += weights.check(files, which)
    world = 0
    if form is not None or _has_traces_of_state(files):
        world = _world_size(files, form)
        found += _check_random_state(files, world)
        found += form.check(files, world) if form is not None else files.need("optimizer.pt")
    parts = [which or "weights?"] + ([form.NAME] if form is not None else [])
    size = world or _recorded_world(files) or None
    base = Judgement(files.name, "", "+".join(parts), step, _epoch(state), size, _metrics(state, step))
    return _conclude(base, found, finished, Verdict.COMPLETE if form is not None else Verdict.WEIGHTS_ONLY)


def _conclude(base: Judgement, found: List[Finding], finished: bool, good: str) -> Judgement:
    if found:
        verdict = Verdict.DAMAGED if finished and any(f.damaged for f in found) else Verdict.INCOMPLETE
        texts = [finding.text for finding in found]
        reason = "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more" if len(texts) > 4 else "")
    else:
        verdict = good
        reason = "whole and resumable" if good == Verdict.COMPLETE else "whole, saved without optimizer state"
    return replace(base, verdict=verdict, reason=reason)


def _check_trainer_state(files: Files, state: Optional[Dict[str, Any]], step: int) -> List[Finding]:
    if _STATE not in files:
        return [Finding(f"{_STATE} is missing")]
    if state is None:
        return [Finding(f"{_STATE} cannot be parsed", damaged=True)]
    if state.get("global_step") != step:
        return [Finding(f"{_STATE} is of step {state.get('global_step')}, not {step}", damaged=True)]
    return []


def _weights_are_wanted(files: Files, which: str, form: Any) -> bool:
    if form is fsdp and which == weights.FULL:
        return False  # the model is in FSDP's own folder
    zero = deepspeed.settings(files).get("zero_optimization")
    gathers = not isinstance(zero, dict) or zero.get("stage3_gather_16bit_weights_on_model_save") is not False
    sharded_only = form is deepspeed and deepspeed.stage(files) == 3 and not gathers
    return which == weights.ADAPTER or not sharded_only


def _has_traces_of_state(files: Files) -> bool:
    saves_all = (files.json("args.json") or {}).get("save_only_model") is False
    return saves_all or "scheduler.pt" in files or bool(files.matching(r"rng_state(_\d+)?\.pth"))


# -- how many ranks ---------------------------------------------------------------------------------------------


def _recorded_world(files: Files) -> int:
    value = (files.json("args.json") or {}).get("global_world_size")
    return value if isinstance(value, int) and value > 0 else 0


def _random_states(files: Files) -> List[int]:
    return [int(match.group(1)) for match in files.matching(r"rng_state_(\d+)\.pth")]


def _world_size(files: Files, form: Any) -> int:
    """As recorded; else the most that any file speaks of, so that whatever lags behind is found missing."""
    recorded = _recorded_world(files)
    if recorded:
        return recorded
    ranks = _random_states(files)
    # A world of one writes rng_state.pth: a number in the name means that there were others.
    by_random_state = max(2, max(ranks) + 1) if ranks else 1
    return max(by_random_state, form.world_size(files) if form is not None else 0)


def _check_random_state(files: Files, world: int) -> List[Finding]:
    if world <= 1:
        return files.need("rng_state.pth")
    lost = gaps(set(_random_states(files)), world)
    names = [f"rng_state_{rank}.pth" for rank in _random_states(files)]
    return files.need(*names) + [Finding(f"rng_state_{rank}.pth is missing") for rank in lost]


# -- what the trainer recorded ------------------------------------------------------------------------------------


def _epoch(state: Optional[Dict[str, Any]]) -> Optional[float]:
    value = (state or {}).get("epoch")
    return float(value) if isinstance(value, (int, float)) else None


def _metrics(state: Optional[Dict[str, Any]], step: int) -> Dict[str, float]:
    """The evaluation at exactly this step and the newest loss up to it. NaN and infinity are left out."""
    history = (state or {}).get("log_history")
    found: Dict[str, float] = {}
    for row in history if isinstance(history, list) else []:
        if not isinstance(row, dict) or not isinstance(row.get("step"), int) or row["step"] > step:
            continue
        for name, value in row.items():
            wanted = name == "loss" or (name.startswith("eval_") and row["step"] == step)
            if wanted and isinstance(value, (int, float)) and value - value == 0:
                found[name] = float(value)
    return found
