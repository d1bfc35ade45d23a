"""Checkpoint folders as ms-swift 4.6 leaves them, made file by file."""

from __future__ import annotations

import json
import struct
from pathlib import Path

ARGS = {"global_world_size": 2, "save_only_model": False, "deepspeed": None, "hub_token": "hf_secret"}


def safetensors(size: int = 64) -> bytes:
    """A safetensors file with one tensor of ``size`` bytes."""
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    )
    return struct.pack("<Q", len(header)) + header.encode() + b"\1" * size


def trainer_state(step: int) -> str:
    rows = [{"step": at, "loss": 1.0 / at, "epoch": at / 100} for at in range(1, step + 1)]
    rows += [{"step": step, "eval_loss": 2.0 / step, "eval_runtime": 0.1}]
    return json.dumps({"global_step": step, "epoch": step / 100, "log_history": rows, "best_model_checkpoint": None})


def common(step: int, args: dict | None = None) -> dict[str, str | bytes]:
    return {
        "args.json": json.dumps({**ARGS, **(args or {})}),
        "trainer_state.json": trainer_state(step),
        "training_args.bin": b"x",
    }


FULL = {"config.json": "{}", "generation_config.json": "{}", "model.safetensors": safetensors()}
ADAPTER = {"adapter_config.json": "{}", "adapter_model.safetensors": safetensors(), "README.md": "x"}
RNG = {"rng_state_0.pth": b"r", "rng_state_1.pth": b"r", "scheduler.pt": b"s"}
DDP = {"optimizer.pt": b"o", **RNG}
INDEX = {
    "config.json": "{}",
    "model-00001-of-00002.safetensors": safetensors(32),
    "model-00002-of-00002.safetensors": safetensors(48),
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ),
}


def deepspeed(step: int, stage: int, ranks: int = 2) -> dict[str, str | bytes]:
    folder = f"global_step{step}"
    files: dict[str, str | bytes] = {"latest": folder, "zero_to_fp32.py": "x", "scheduler.pt": b"s"}
    files |= {f"rng_state_{rank}.pth": b"r" for rank in range(ranks)}
    if stage >= 1:
        files |= {f"{folder}/bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt": b"o" for r in range(ranks)}
    if stage == 3:
        files |= {f"{folder}/zero_pp_rank_{r}_mp_rank_00_model_states.pt": b"m" for r in range(ranks)}
    else:
        files |= {f"{folder}/mp_rank_00_model_states.pt": b"m"}
    return files


def distributed(folder: str) -> dict[str, str | bytes]:
    names = ["__0_0.distcp", "__0_1.distcp", "__1_0.distcp"]
    pickled = b"\x80\x04" + b"".join(b"\x8c\x0c" + name.encode() + b"\x94" for name in names)
    return {f"{folder}/.metadata": pickled, **{f"{folder}/{name}": b"d" for name in names}}


def megatron(step: int, **args: object) -> dict[str, str | bytes]:
    folder = f"iter_{step:07d}"
    return {
        "args.json": json.dumps({"no_save_optim": False, "save_safetensors": True, **args}),
        "latest_checkpointed_iteration.txt": str(step),
        f"{folder}/common.pt": b"c",
        f"{folder}/metadata.json": "{}",
        **distributed(folder),
        **FULL,
    }


#: name → (files at step 8, the files whose loss must change the verdict)
LAYOUTS: dict[str, tuple[dict[str, str | bytes], set[str]]] = {}


def _add(name: str, files: dict[str, str | bytes], *not_needed: str) -> None:
    spare = {"args.json", "training_args.bin", "generation_config.json", "README.md", "zero_to_fp32.py", *not_needed}
    LAYOUTS[name] = files, set(files) - spare


_add("full+ddp", {**common(8), **FULL, **DDP})
_add("full+ddp, sharded weights", {**common(8), **INDEX, **DDP})
_add("adapter+ddp", {**common(8), **ADAPTER, **DDP})
_one_rank = {**common(8, {"global_world_size": 1}), **FULL, "optimizer.pt": b"o", "scheduler.pt": b"s"}
_add("full+ddp, one rank", {**_one_rank, "rng_state.pth": b"r"})
for _stage in (0, 1, 2, 3):
    _config = {"deepspeed": {"zero_optimization": {"stage": _stage}}}
    _add(f"full+deepspeed, stage {_stage}", {**common(8, _config), **FULL, **deepspeed(8, _stage)})
_add("adapter+deepspeed, stage 3", {**common(8), **ADAPTER, **deepspeed(8, 3)})
_config = {"deepspeed": {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}}}
_add("full+deepspeed, not gathered", {**common(8, _config), "config.json": "{}", **deepspeed(8, 3)}, "config.json")
_fsdp = {**distributed("pytorch_model_fsdp_0"), **distributed("optimizer_0"), **RNG}
_add("full+fsdp", {**common(8), "config.json": "{}", **_fsdp}, "config.json")
_add("adapter+fsdp", {**common(8), **ADAPTER, **_fsdp})
_add("megatron", megatron(8))
LAYOUTS["megatron"][1].add("args.json")


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    """Lay the files down in ``folder``."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder
