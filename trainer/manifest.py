"""``manifest.json``: what makes a checkpoint in the bucket real. It is written last and removed first."""

from __future__ import annotations

import json
from typing import Iterator

from trainer.protocol import Manifest, ProtocolError, from_dict, to_dict

NAME = "manifest.json"
PINNED = "pinned.json"  # beside it: the checkpoint is kept whatever a policy says
LATEST = "latest.json"  # in the run's folder: which of its checkpoints is the newest one
RUN = "run.json"  # in the run's folder, before the first file: whose it is
SCHEMA_VERSION = 1


class ManifestError(ValueError):
    """A manifest that cannot be trusted; the message says why."""


def encode(manifest: Manifest) -> bytes:
    """The manifest as the JSON text that is stored.

    Raises:
        ManifestError: see :func:`validate`.
    """
    validate(manifest)
    return (json.dumps(to_dict(manifest), ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()


def decode(data: bytes) -> Manifest:
    """The manifest in stored bytes.

    Raises:
        ManifestError: it is not JSON, lacks a field, comes from a newer version or names odd files.
    """
    try:
        manifest = from_dict(Manifest, json.loads(data))
    except (ValueError, ProtocolError) as error:
        raise ManifestError(f"not a manifest: {error}") from None
    validate(manifest)
    return manifest


def validate(manifest: Manifest) -> None:
    """Check that the manifest can be trusted: a known schema, files, and only plain paths below the checkpoint.

    Raises:
        ManifestError: it cannot; the message names all faults.
    """
    faults = list(_faults(manifest))
    if faults:
        raise ManifestError(f"manifest of {manifest.name!r}: " + "; ".join(faults[:5]))


def _faults(manifest: Manifest) -> Iterator[str]:
    if manifest.schema_version > SCHEMA_VERSION:
        yield f"schema version {manifest.schema_version} is newer than {SCHEMA_VERSION}"
    if not manifest.files:
        yield "it names no files"
    seen = set()
    for file in manifest.files:
        if not is_plain(file.path) or file.path in (NAME, PINNED):
            yield f"path {file.path!r} is refused"
        if file.path in seen:
            yield f"path {file.path!r} is named twice"
        seen.add(file.path)
        if file.size < 0 or not file.crc64.isdigit():
            yield f"size {file.size} or crc64 {file.crc64!r} of {file.path!r} is no number"


def is_plain(path: str) -> bool:
    """Whether ``path`` is relative, with ``/``, and stays below its folder."""
    return (
        bool(path) and "\\" not in path and "\0" not in path and all(p not in ("", ".", "..") for p in path.split("/"))
    )


def same_files(one: Manifest, other: Manifest) -> bool:
    """Whether two manifests speak of the same contents, whoever wrote them and when."""
    return {(f.path, f.size, f.crc64) for f in one.files} == {(f.path, f.size, f.crc64) for f in other.files}
