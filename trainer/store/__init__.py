"""Object storage, for both sides: the one package that speaks to OSS; it imports ``oss2`` on first use."""

from trainer.store.checkpoints import (
    delete_checkpoint,
    find_manifests,
    list_manifests,
    read_manifest,
    verify,
    write_manifest,
)
from trainer.store.client import (
    ManifestConflictError,
    Stored,
    StoreError,
    head,
    list_objects,
    open_bucket,
    read_bytes,
)
from trainer.store.files import crc64_of, get_file, put_file

__all__ = [
    "ManifestConflictError",
    "StoreError",
    "Stored",
    "crc64_of",
    "delete_checkpoint",
    "find_manifests",
    "get_file",
    "head",
    "list_manifests",
    "list_objects",
    "open_bucket",
    "put_file",
    "read_bytes",
    "read_manifest",
    "verify",
    "write_manifest",
]
