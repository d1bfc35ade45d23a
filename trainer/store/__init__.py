"""Object storage, for both sides: the one package that speaks to OSS; it imports ``oss2`` on first use."""

from trainer.store.body import CancelledError
from trainer.store.checkpoints import (
    delete_checkpoint,
    find_manifests,
    list_manifests,
    read_manifest,
    verify,
    write_manifest,
)
from trainer.store.client import (
    Keyring,
    ManifestConflictError,
    Stored,
    StoreError,
    head,
    list_objects,
    open_bucket,
    read_bytes,
)
from trainer.store.download import Wanted, get_files
from trainer.store.files import crc64_of, get_file, put_file
from trainer.store.pace import Pace, yield_to_others
from trainer.store.sender import FILES_AT_ONCE, Sender
from trainer.store.upload import Settings

__all__ = [
    "FILES_AT_ONCE",
    "CancelledError",
    "Keyring",
    "ManifestConflictError",
    "Pace",
    "Sender",
    "Settings",
    "StoreError",
    "Stored",
    "Wanted",
    "crc64_of",
    "delete_checkpoint",
    "find_manifests",
    "get_file",
    "get_files",
    "head",
    "list_manifests",
    "list_objects",
    "open_bucket",
    "put_file",
    "read_bytes",
    "read_manifest",
    "verify",
    "write_manifest",
    "yield_to_others",
]
