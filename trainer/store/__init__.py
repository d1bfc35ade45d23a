"""Object storage, for both sides: the one package that speaks to OSS; it imports ``oss2`` on first use."""

from trainer.store.body import CancelledError
from trainer.store.checkpoints import (
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
from trainer.store.crc64 import crc64_of
from trainer.store.deleting import delete_checkpoint, delete_objects
from trainer.store.download import Wanted, get_files
from trainer.store.garbage import Leftover, find_leftovers, remove
from trainer.store.marks import latest, pin, read_run, unpin, write_latest, write_run
from trainer.store.pace import Pace, yield_to_others
from trainer.store.sender import FILES_AT_ONCE, Sender
from trainer.store.survey import Folder, survey
from trainer.store.upload import Settings
from trainer.store.verifying import verify_bytes

__all__ = [
    "FILES_AT_ONCE",
    "CancelledError",
    "Folder",
    "Keyring",
    "Leftover",
    "ManifestConflictError",
    "Pace",
    "Sender",
    "Settings",
    "StoreError",
    "Stored",
    "Wanted",
    "crc64_of",
    "delete_checkpoint",
    "delete_objects",
    "find_leftovers",
    "find_manifests",
    "get_files",
    "head",
    "latest",
    "list_manifests",
    "list_objects",
    "open_bucket",
    "pin",
    "read_bytes",
    "read_manifest",
    "read_run",
    "remove",
    "survey",
    "unpin",
    "verify",
    "verify_bytes",
    "write_latest",
    "write_manifest",
    "write_run",
    "yield_to_others",
]
