"""Checkpoints in the bucket: only what has a manifest exists."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Dict, List, Optional

from trainer import manifest as manifests
from trainer.protocol import Manifest, OssTarget, StoredFile
from trainer.store.client import (
    ManifestConflictError,
    StoreError,
    head,
    list_objects,
    open_bucket,
    read_bytes,
    retrying,
)

if TYPE_CHECKING:
    import oss2

_ASKERS = 8  # objects that are asked for at the same time


def write_manifest(target: OssTarget, manifest: Manifest) -> None:
    """Make the checkpoint at ``target`` real. A manifest of the same files that is there already is as good.

    Raises:
        ManifestConflictError: a manifest of other files is there.
        StoreError: it could not be written.
    """
    import oss2

    bucket, key, data = open_bucket(target), target.key(manifests.NAME), manifests.encode(manifest)

    def write() -> None:
        try:
            bucket.put_object(key, data, headers={"x-oss-forbid-overwrite": "true"})
        except oss2.exceptions.ServerError as error:
            if error.code != "FileAlreadyExists":
                raise
            known = read_manifest(target)
            if known is None or not manifests.same_files(known, manifest):
                raise ManifestConflictError(f"{target.url} already holds another {manifest.name}") from None

    retrying(write, f"PUT {key}")


def read_manifest(target: OssTarget, bucket: Optional[oss2.Bucket] = None) -> Optional[Manifest]:
    """The manifest of the checkpoint at ``target``; ``None``: there is no such checkpoint.

    ``bucket`` is an open one with keys of its own.

    Raises:
        StoreError: it cannot be read or trusted.
    """
    key = target.key(manifests.NAME)
    data = read_bytes(bucket or open_bucket(target), key)
    try:
        return manifests.decode(data) if data is not None else None
    except manifests.ManifestError as error:
        raise StoreError(f"oss://{target.bucket}/{key}: {error}") from None


def find_manifests(target: OssTarget) -> Dict[str, Manifest]:
    """Every real checkpoint below ``target``: its prefix in the bucket → its manifest, by prefix.

    Raises:
        StoreError: the bucket cannot be listed, or a manifest cannot be read or trusted.
    """
    bucket, ending = open_bucket(target), "/" + manifests.NAME
    found: Dict[str, Manifest] = {}
    for item in list_objects(bucket, target.prefix + "/" if target.prefix else ""):
        if item.key.endswith(ending):
            prefix = item.key[: -len(ending)]
            manifest = read_manifest(dataclasses.replace(target, prefix=prefix), bucket)
            if manifest is not None:
                found[prefix] = manifest
    return found


def list_manifests(target: OssTarget) -> List[Manifest]:
    """The manifests of :func:`find_manifests`, oldest step first."""
    return sorted(find_manifests(target).values(), key=lambda item: (item.run_id, item.step))


def verify(target: OssTarget, manifest: Manifest) -> Dict[str, str]:
    """What is wrong in the bucket with each file of the manifest, by path; empty = the checkpoint is proven."""
    bucket = open_bucket(target)

    def fault(file: StoredFile) -> str:
        stored = head(bucket, target.key(file.path))
        if stored is None:
            return "is not there"
        if (stored.size, stored.crc64) != (file.size, file.crc64):
            return f"has size {stored.size}, CRC64 {stored.crc64}; not {file.size}, {file.crc64}"
        return ""

    with ThreadPoolExecutor(_ASKERS) as pool:
        faults = list(pool.map(fault, manifest.files))
    return {file.path: text for file, text in zip(manifest.files, faults) if text}
