"""The ``backup`` and ``fetch`` verbs: checkpoint files between this node and the bucket, each proven by CRC64."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Callable, Dict, Tuple

from trainer import store
from trainer.files import PRIVATE_FOLDER, locked, size_or_zero, sync_folder
from trainer.manifest import NAME, is_plain
from trainer.protocol import BackupReply, BackupRequest, FetchReply, FetchRequest, Manifest, StoredFile

if TYPE_CHECKING:
    import oss2

_PATIENCE_S = 3600.0  # that one transfer waits for another one of the same checkpoint


def backup(request: BackupRequest) -> BackupReply:
    """Send the named files. One that fails does not keep the others from being sent; run it again for the rest.

    Raises:
        StoreError: the bucket cannot be used at all.
        TimeoutError: another process has been sending this checkpoint for an hour.
    """
    if request.low_priority:
        store.yield_to_others()
    return send(request, store.Keyring(request.target.credentials), store.Pace(0, request.bandwidth))


def send(
    request: BackupRequest, keyring: store.Keyring, pace: store.Pace, cancelled: Callable[[], bool] = lambda: False
) -> BackupReply:
    """Send the named files: :func:`backup` for a caller that watches, replaces keys, or changes its mind."""
    folder = os.path.join(request.output_dir, request.checkpoint)
    state_dir = request.state_dir or os.path.join(request.output_dir, ".backup")
    os.makedirs(state_dir, mode=PRIVATE_FOLDER, exist_ok=True)
    settings = store.Settings(state_dir, request.part_size, request.threads, pace, cancelled)
    bucket = store.open_bucket(request.target, keyring, connections=request.threads + store.FILES_AT_ONCE)
    reply, began = BackupReply(), time.monotonic()
    paths = {request.target.key(path): path for path in request.files if is_plain(path) and path != NAME}
    for path in request.files:
        if path not in paths.values():
            reply.errors[path] = "refused: not a plain relative path of a file of a checkpoint"
    pace.total += sum(size_or_zero(os.path.join(folder, path)) for path in paths.values())
    with locked(os.path.join(state_dir, f"{request.checkpoint}.lock"), _PATIENCE_S):
        try:
            fixed = _fixed(request, bucket)
        except store.StoreError as error:
            reply.errors.update(dict.fromkeys(paths.values(), str(error)))
            return reply
        sender = store.Sender(bucket, request.target.prefix, settings, fixed)
        outcome = sender.send([(os.path.join(folder, path), key) for key, path in paths.items()])
        reply.leftovers = sender.clean_up(list(outcome.proven))
    for key, path in paths.items():
        if key in outcome.errors:
            reply.errors[path] = outcome.errors[key]
            continue
        sent = outcome.proven[key]
        reply.files.append(StoredFile(path, sent.stored.size, sent.stored.crc64, request.node))
        reply.sent, reply.copied = reply.sent + sent.sent, reply.copied + sent.copied
    reply.seconds = round(time.monotonic() - began, 3)
    return reply


def _fixed(request: BackupRequest, bucket: oss2.Bucket) -> Dict[str, Tuple[int, str]]:
    """What a manifest in the bucket speaks for already: it must never become a lie."""
    manifest = store.read_manifest(request.target, bucket)
    return {request.target.key(file.path): (file.size, file.crc64) for file in manifest.files} if manifest else {}


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
    bucket = store.open_bucket(request.target, connections=2 * request.threads)
    wanted = [
        store.Wanted(request.target.key(file.path), os.path.join(partial, file.path), file.size, file.crc64)
        for file in manifest.files
    ]
    pace = store.Pace(manifest.total_bytes, request.bandwidth)
    received = store.get_files(bucket, wanted, request.threads, pace)
    os.rename(partial, destination)
    sync_folder(os.path.dirname(destination))
    return FetchReply(destination, len(manifest.files), manifest.total_bytes, received=received)


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
