"""The ``stage`` verb: model and data are on the node, proven by a digest, before anything starts."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from typing import Dict, Iterator, List, Tuple

from trainer import store
from trainer.files import PRIVATE_FOLDER, locked, read_bytes, write_atomic
from trainer.manifest import is_plain
from trainer.paths import NodePaths
from trainer.protocol import OssTarget, StagedItem, StageItem, StageReply, StageRequest

_PATIENCE_S = 6 * 3600.0  # that one run waits for another that brings the same item
_BLOCK = 4 << 20  # bytes


def stage(request: StageRequest) -> StageReply:
    """Stage each item; an item that fails has an ``error`` and does not keep the others from being staged.

    Raises:
        PathError: the work folder's path is refused.
    """
    node = NodePaths(request.workdir)
    node.create()
    digests = Digests(os.path.join(node.cache, "digests.json"))
    reply = StageReply()
    for item in request.items:
        try:
            staged = _stage_oss(node, item) if item.source.startswith("oss://") else StagedItem(item.name, item.source)
            path = staged.path or _local(item.source)
            reply.items.append(_describe(dataclasses.replace(staged, path=path), digests))
        except (OSError, ValueError, store.StoreError) as error:
            reply.items.append(StagedItem(item.name, item.source, error=str(error)))
    digests.save()
    return reply


def _local(source: str) -> str:
    if not os.path.isabs(source):
        raise ValueError(f"{source!r} is neither an absolute path nor an oss:// location")
    if not os.path.exists(source):
        raise FileNotFoundError(f"{source} does not exist on this node")
    return source


def _describe(item: StagedItem, digests: Digests) -> StagedItem:
    files = list(_files(item.path))
    size = sum(os.path.getsize(path) for _, path in files)
    return dataclasses.replace(item, digest=digests.of(files), files=len(files), size=size)


def _files(path: str) -> Iterator[Tuple[str, str]]:
    """(relative name, path) of each file below ``path``, or of the file itself; by name, hidden ones left out."""
    if not os.path.isdir(path):
        yield "", path
        return
    found = []
    for where, folders, names in os.walk(path, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                full = os.path.join(where, name)
                found.append((os.path.relpath(full, path).replace(os.sep, "/"), full))
    yield from sorted(found)


class Digests:
    """SHA-256 of files, remembered by path, size and modification time, so that a warm run reads nothing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._known: Dict[str, List[object]] = {}
        with contextlib.suppress(ValueError):
            self._known = json.loads(read_bytes(path) or b"{}")
        self._changed = False

    def of(self, files: List[Tuple[str, str]]) -> str:
        """One digest over names and contents: equal on two nodes means equal content, wherever it lies."""
        total = hashlib.sha256()
        for name, path in files:
            total.update(f"{name}\0{self._of_file(path)}\n".encode("utf-8", "surrogateescape"))
        return total.hexdigest()

    def _of_file(self, path: str) -> str:
        path = os.path.realpath(path)
        stat = os.stat(path)
        known = self._known.get(path)
        if known and known[:2] == [stat.st_size, stat.st_mtime_ns]:
            return str(known[2])
        digest = hashlib.sha256()
        with open(path, "rb") as stream:
            while True:
                block = stream.read(_BLOCK)
                if not block:
                    break
                digest.update(block)
        self._known[path] = [stat.st_size, stat.st_mtime_ns, digest.hexdigest()]
        self._changed = True
        return digest.hexdigest()

    def save(self) -> None:
        """Remember for the next run; losing this costs time only."""
        if self._changed:
            with contextlib.suppress(OSError):
                write_atomic(self._path, json.dumps(self._known).encode())


# -- from the bucket --------------------------------------------------------------------------------------------


def _stage_oss(node: NodePaths, item: StageItem) -> StagedItem:
    if item.oss is None:
        raise ValueError(f"{item.source}: no endpoint and credentials were given for it")
    bucket_name, _, key = item.source[len("oss://") :].partition("/")
    target = dataclasses.replace(item.oss, bucket=bucket_name, prefix="")
    objects = _objects(target, key, item.source)
    folder = os.path.join(node.cache, _cache_key(bucket_name, key, objects))
    path = os.path.join(folder, os.path.basename(key.rstrip("/")) or bucket_name)
    os.makedirs(folder, mode=PRIVATE_FOLDER, exist_ok=True)
    fetched = 0
    with locked(os.path.join(folder, "lock"), _PATIENCE_S):
        if not os.path.exists(path):
            fetched = _download(target, key, objects, path)
        os.utime(folder)  # what sweep goes by: when it was wanted last
    return StagedItem(item.name, item.source, path, fetched=fetched)


def _objects(target: OssTarget, key: str, source: str) -> List[store.Stored]:
    """The objects of a location; a location that ends with a slash is a folder."""
    bucket = store.open_bucket(target)
    if key and not key.endswith("/"):
        single = store.head(bucket, key)
        if single is None:
            raise FileNotFoundError(f"{source} does not exist; a folder needs a slash at its end")
        return [single]
    found = [item for item in store.list_objects(bucket, key) if not item.key.endswith("/")]
    if not found:
        raise FileNotFoundError(f"nothing lies below {source}")
    odd = [item.key for item in found if not is_plain(item.key[len(key) :])]
    if odd:
        raise ValueError(f"{source}: the key {odd[0]!r} cannot be a file's path")
    return found


def _cache_key(bucket: str, key: str, objects: List[store.Stored]) -> str:
    rows = [f"{item.key}\0{item.etag}\0{item.size}" for item in objects]
    return hashlib.sha256("\n".join([bucket, key, *rows]).encode()).hexdigest()[:24]


def _download(target: OssTarget, key: str, objects: List[store.Stored], path: str) -> int:
    """Bring all objects beside ``path``, then put them there in one step; an interrupted download goes on later."""
    bucket, partial = store.open_bucket(target), f"{path}.partial"
    is_folder, wanted = not key or key.endswith("/"), []
    for item in objects:
        proven = item if item.crc64 else store.head(bucket, item.key)
        if proven is None or proven.size != item.size:
            raise store.StoreError(f"{item.key} changed while it was staged")
        local = os.path.join(partial, item.key[len(key) :]) if is_folder else partial
        wanted.append(store.Wanted(item.key, local, proven.size, proven.crc64))
    fetched = store.get_files(bucket, wanted)
    os.rename(partial, path)
    return fetched
