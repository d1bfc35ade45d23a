"""The ``backup`` and ``fetch`` verbs: checkpoint files between this node and the bucket, each proven by CRC64."""

from __future__ import annotations

import os
from typing import Dict

from trainer import store
from trainer.files import PRIVATE_FOLDER, locked, sync_folder
from trainer.manifest import is_plain
from trainer.protocol import BackupReply, BackupRequest, FetchReply, FetchRequest, Manifest, StoredFile

_PATIENCE_S = 3600.0  # that one transfer waits for another one of the same checkpoint


def backup(request: BackupRequest) -> BackupReply:
    """Send the named files. One that fails does not keep the others from being sent; run it again for the rest.

    Raises:
        StoreError: the bucket cannot be used at all.
    """
    folder = os.path.join(request.output_dir, request.checkpoint)
    state_dir = request.state_dir or os.path.join(request.output_dir, ".backup")
    os.makedirs(state_dir, mode=PRIVATE_FOLDER, exist_ok=True)
    bucket, reply = store.open_bucket(request.target), BackupReply()
    with locked(os.path.join(state_dir, f"{request.checkpoint}.lock"), _PATIENCE_S):
        for path in request.files:
            if not is_plain(path):
                reply.errors[path] = "refused: not a plain relative path"
                continue
            key, local = request.target.key(path), os.path.join(folder, path)
            try:
                stored, sent = store.put_file(bucket, key, local, state_dir, request.part_size, request.threads)
            except (store.StoreError, OSError) as error:
                reply.errors[path] = str(error)
            else:
                reply.files.append(StoredFile(path, stored.size, stored.crc64, request.node))
                reply.sent += sent
    return reply


def fetch(request: FetchRequest) -> FetchReply:
    """Bring a checkpoint back. It appears at ``destination`` at once and whole, or not at all.

    What an interrupted fetch brought is kept beside it and used by the next one.
    """
    if not os.path.isabs(request.destination):
        return FetchReply(error=f"destination must be an absolute path, got {request.destination!r}")
    destination = os.path.normpath(request.destination)
    parent, name = os.path.split(destination)
    try:
        os.makedirs(parent, exist_ok=True)
        with locked(os.path.join(parent, f".{name}.lock"), _PATIENCE_S):
            return _fetch(request, destination, os.path.join(parent, f".{name}.partial"))
    except (store.StoreError, OSError) as error:
        return FetchReply(error=str(error))


def _fetch(request: FetchRequest, destination: str, partial: str) -> FetchReply:
    manifest = store.read_manifest(request.target)
    if manifest is None:
        return FetchReply(error=f"{request.target.url} holds no checkpoint: there is no manifest")
    if os.path.lexists(destination):
        wrong = differences(destination, manifest)
        if wrong:
            path, what = next(iter(wrong.items()))
            return FetchReply(error=f"{destination} exists and differs: {path} {what}. Move it away and try again")
        return FetchReply(destination, len(manifest.files), manifest.total_bytes)
    bucket = store.open_bucket(request.target)
    for file in manifest.files:
        path = os.path.join(partial, file.path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        store.get_file(bucket, request.target.key(file.path), path, file.size, file.crc64)
    os.rename(partial, destination)
    sync_folder(os.path.dirname(destination))
    return FetchReply(destination, len(manifest.files), manifest.total_bytes)


def differences(folder: str, manifest: Manifest) -> Dict[str, str]:
    """How the files in ``folder`` differ from a manifest, by path; files that it does not name do not matter."""
    wrong = {}
    for file in manifest.files:
        path = os.path.join(folder, file.path)
        try:
            if os.path.getsize(path) != file.size:
                wrong[file.path] = f"has {os.path.getsize(path)} bytes, not {file.size}"
            elif store.crc64_of(path) != file.crc64:
                wrong[file.path] = "has another content"
        except OSError as error:
            wrong[file.path] = f"cannot be read: {error.strerror}"
    return wrong
