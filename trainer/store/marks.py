"""Small objects beside the checkpoints: pins, whose a run's folder is, and which of its checkpoints is the newest."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Dict, Optional

from trainer import manifest as manifests
from trainer.protocol import Manifest, OssTarget
from trainer.store.checkpoints import read_manifest
from trainer.store.client import StoreError, head, open_bucket, read_bytes, retrying


def pin(target: OssTarget, mark: Dict[str, str]) -> None:
    """Keep the checkpoint at ``target`` whatever a policy says; ``mark`` tells people who wants it and why.

    Raises:
        StoreError: there is no checkpoint, or the bucket cannot be written.
    """
    if read_manifest(target) is None:
        raise StoreError(f"{target.url} holds no checkpoint: there is no manifest")
    _write(target, manifests.PINNED, mark)
    if head(open_bucket(target), target.key(manifests.NAME)) is None:
        unpin(target)
        raise StoreError(f"{target.url} was deleted while it was pinned")


def unpin(target: OssTarget) -> bool:
    """Let a policy decide again; returns whether it was pinned.

    Raises:
        StoreError: the bucket cannot be written.
    """
    return _remove(target, manifests.PINNED)


def write_run(target: OssTarget, mark: Dict[str, str]) -> None:
    """Say in the run's folder ``target`` whose it is, before the first file is there."""
    if _read(target, manifests.RUN) != mark:
        _write(target, manifests.RUN, mark)


def read_run(target: OssTarget) -> Dict[str, str]:
    """What :func:`write_run` wrote; empty where there is nothing."""
    return _read(target, manifests.RUN) or {}


def write_latest(target: OssTarget, manifest: Manifest) -> bool:
    """Point ``latest.json`` of the run's folder ``target`` at a checkpoint whose manifest is written.

    It never goes back to a smaller step while what it points at exists. Returns whether it was written.
    """
    known = _read(target, manifests.LATEST)
    if known is not None and int(known.get("step") or 0) > manifest.step and latest(target) is not None:
        return False
    mark = {
        "name": manifest.name,
        "step": manifest.step,
        "verdict": manifest.verdict,
        "created_at": manifest.created_at,
    }
    _write(target, manifests.LATEST, mark)
    return True


def latest(target: OssTarget) -> Optional[Manifest]:
    """The manifest that ``latest.json`` of the run's folder ``target`` points at; ``None``: it points at nothing.

    Raises:
        StoreError: the bucket cannot be read.
    """
    known = _read(target, manifests.LATEST)
    name = str((known or {}).get("name") or "")
    if not manifests.is_plain(name):
        return None
    return read_manifest(dataclasses.replace(target, prefix=target.key(name)))


def drop_latest(target: OssTarget, name: str) -> None:
    """Remove ``latest.json`` of the run's folder ``target`` where it points at ``name``, which is about to go."""
    known = _read(target, manifests.LATEST)
    if known is not None and known.get("name") == name:
        _remove(target, manifests.LATEST)


def _write(target: OssTarget, name: str, mark: Dict[str, Any]) -> None:
    bucket, key = open_bucket(target), target.key(name)
    data = (json.dumps(mark, ensure_ascii=False, indent=1) + "\n").encode()
    retrying(lambda: bucket.put_object(key, data), f"PUT {key}")


def _remove(target: OssTarget, name: str) -> bool:
    bucket, key = open_bucket(target), target.key(name)
    there = head(bucket, key) is not None
    retrying(lambda: bucket.delete_object(key), f"DELETE {key}")
    return there


def _read(target: OssTarget, name: str) -> Optional[Dict[str, Any]]:
    """The mark; ``None`` where there is none, ``{}`` where it is not one."""
    data = read_bytes(open_bucket(target), target.key(name))
    if data is None:
        return None
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
