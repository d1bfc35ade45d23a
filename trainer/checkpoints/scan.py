"""Reading checkpoint folders into listings: names, sizes, and of a few small files the part that the judge needs."""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from trainer.checkpoints.completeness import step_of
from trainer.checkpoints.distributed import FILE
from trainer.protocol import CheckpointListing, CheckpointsReply, CheckpointsRequest, FileEntry

_HEADER_LIMIT = 100 << 20  # bytes; the format's own limit
_TEXT_LIMIT = 64 << 20  # bytes of a JSON file that is still read
_HISTORY = 50  # newest rows of the trainer's history that are kept
_ARGUMENTS = ("global_world_size", "deepspeed", "no_save_optim", "save_safetensors", "save_only_model")
_STATE = ("global_step", "epoch", "max_steps", "best_metric", "best_model_checkpoint", "best_global_step")


def checkpoints(request: CheckpointsRequest) -> CheckpointsReply:
    """The verb: every ``checkpoint-<step>`` folder below ``output_dir``, by step. A missing folder holds none."""
    names = checkpoint_names(request.output_dir)
    listings = [scan_checkpoint(os.path.join(request.output_dir, name)) for name in names]
    return CheckpointsReply(
        [listing for listing in listings if listing is not None],
        last=link_target(request.output_dir, "last-checkpoint") or link_target(request.output_dir, "last"),
        best=link_target(request.output_dir, "best") or _best(listings),
    )


def checkpoint_names(output_dir: str) -> List[str]:
    """The names of the checkpoint folders in ``output_dir``, by step. Links are not followed."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(output_dir) as entries:
        found = [e.name for e in entries if step_of(e.name) is not None and e.is_dir(follow_symlinks=False)]
    return sorted(found, key=lambda name: (step_of(name) or 0, name))


def link_target(output_dir: str, link: str) -> Optional[str]:
    """The checkpoint that a link in ``output_dir`` points at."""
    try:
        name = os.path.basename(os.readlink(os.path.join(output_dir, link)))
    except OSError:
        return None
    return name if step_of(name) is not None else None


def _best(listings: List[Optional[CheckpointListing]]) -> Optional[str]:
    for listing in reversed(listings):
        for entry in listing.files if listing is not None else []:
            if entry.path == "trainer_state.json" and entry.text:
                with contextlib.suppress(ValueError, AttributeError):
                    path = json.loads(entry.text).get("best_model_checkpoint")
                    return os.path.basename(path) if path else None
    return None


def scan_checkpoint(folder: str) -> Optional[CheckpointListing]:
    """What lies in one checkpoint folder; ``None`` when it vanished meanwhile (the trainer rotates)."""
    if not os.path.isdir(folder):
        return None
    return CheckpointListing(os.path.basename(folder), sorted(_entries(folder), key=lambda entry: entry.path))


def _entries(folder: str) -> Iterator[FileEntry]:
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(path)
                relative = os.path.relpath(path, folder).replace(os.sep, "/")
                header_ok = check_safetensors(path, stat.st_size) if name.endswith(".safetensors") else None
                text = _read(path, name, stat.st_size)
                yield FileEntry(relative, stat.st_size, stat.st_mtime, text, header_ok)


def check_safetensors(path: str, size: int) -> bool:
    """Whether the header of a safetensors file is whole and speaks of exactly as many bytes as follow it."""
    try:
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
                return False
            header = json.loads(stream.read(length))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        return max(ends, default=0) == size - 8 - length
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return False


# -- the few files whose content matters: only what the judge needs leaves the node ------------------------------


def _plain(data: bytes) -> str:
    return data[:1024].decode("utf-8", "replace")


def _pick(keys: Tuple[str, ...]) -> Callable[[bytes], str]:
    def reduce(data: bytes) -> str:
        value = json.loads(data)
        return json.dumps({key: value[key] for key in keys if key in value})

    return reduce


def _trainer_state(data: bytes) -> str:
    value = json.loads(data)
    kept: Dict[str, Any] = {key: value[key] for key in _STATE if key in value}
    history = value.get("log_history")
    kept["log_history"] = history[-_HISTORY:] if isinstance(history, list) else []
    return json.dumps(kept)


def _index(data: bytes) -> str:
    shards = sorted(set(json.loads(data)["weight_map"].values()))
    return json.dumps({"weight_map": {str(number): shard for number, shard in enumerate(shards)}})


def _distributed_files(data: bytes) -> str:
    return "\n".join(sorted({name.decode() for name in re.findall(FILE.encode(), data)}))


_READERS: Dict[str, Callable[[bytes], str]] = {
    "latest": _plain,
    "latest_checkpointed_iteration.txt": _plain,
    "args.json": _pick(_ARGUMENTS),  # the whole of it may hold tokens
    "trainer_state.json": _trainer_state,
    ".metadata": _distributed_files,
}


def _read(path: str, name: str, size: int) -> Optional[str]:
    reader = _index if name.endswith(".index.json") else _READERS.get(name)
    if reader is None or size > _TEXT_LIMIT * (64 if name == ".metadata" else 1):
        return None
    with open(path, "rb") as stream:
        data = stream.read()
    try:
        return reader(data)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""  # not parseable; the judge says so
