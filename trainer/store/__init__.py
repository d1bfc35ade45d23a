"""Object storage, for both sides: the one package that speaks to OSS; it imports ``oss2`` on first use."""

from trainer.store.checkpoints import (
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
from trainer.store.deleting import delete_checkpoint, delete_objects
from trainer.store.files import crc64_of, get_file, put_file
from trainer.store.garbage import Leftover, find_leftovers, remove
from trainer.store.marks import latest, pin, read_run, unpin, write_latest, write_run
from trainer.store.survey import Folder, survey
from trainer.store.verifying import verify_bytes

__all__ = [
    "Folder",
    "Leftover",
    "ManifestConflictError",
    "StoreError",
    "Stored",
    "crc64_of",
    "delete_checkpoint",
    "delete_objects",
    "find_leftovers",
    "find_manifests",
    "get_file",
    "head",
    "latest",
    "list_manifests",
    "list_objects",
    "open_bucket",
    "pin",
    "put_file",
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
]
