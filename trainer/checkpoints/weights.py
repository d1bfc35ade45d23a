"""Model weights in Hugging Face form: a full model or a LoRA adapter, in one file or in shards with an index."""

from __future__ import annotations

from typing import List, Optional

from trainer.checkpoints.judgement import Files, Finding

FULL, ADAPTER = "full", "adapter"
_SHARD = r"{stem}-(\d{{5}})-of-(\d{{5}})\.{suffix}"


def kind(files: Files) -> Optional[str]:
    """Which kind of weights there are or should be; ``None`` when nothing points at any."""
    if files.matching(r"adapter_(config\.json|model\.(safetensors|bin).*)"):
        return ADAPTER
    if files.matching(r"config\.json|(pytorch_)?model.*\.(safetensors|bin)(\.index\.json)?"):
        return FULL
    return None


def check(files: Files, which: str) -> List[Finding]:
    """What is missing or broken in the weights."""
    if which == ADAPTER:
        stems = ("adapter_model.safetensors", "adapter_model.bin")
        return files.need("adapter_config.json") + _check_one_of(files, stems)
    return files.need("config.json") + _check_one_of(files, ("model.safetensors", "pytorch_model.bin"))


def _check_one_of(files: Files, names: tuple[str, ...]) -> List[Finding]:
    for name in names:
        if f"{name}.index.json" in files or _shards(files, name):
            return _check_shards(files, name)
        if name in files:
            return files.need(name)
    return files.need(names[0])


def _shards(files: Files, name: str) -> List[tuple[str, int]]:
    stem, _, suffix = name.partition(".")
    return [(match.group(0), int(match.group(2))) for match in files.matching(_SHARD.format(stem=stem, suffix=suffix))]


def _check_shards(files: Files, name: str) -> List[Finding]:
    index = f"{name}.index.json"
    found = files.need(index)
    if found:
        return found
    weight_map = (files.json(index) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        return [Finding(f"{index} cannot be parsed", damaged=True)]
    return files.need(*sorted({str(shard) for shard in weight_map.values()}))
