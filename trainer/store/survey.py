"""What really lies below a place in the bucket: checkpoint folders with their objects, with or without a manifest."""

from __future__ import annotations

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Dict, List, Optional

from trainer import manifest as manifests
from trainer.protocol import Manifest, OssTarget
from trainer.store.checkpoints import read_manifest
from trainer.store.client import Stored, StoreError, list_objects, open_bucket

if TYPE_CHECKING:
    import oss2

_FOLDER = re.compile(r"(?P<prefix>(?:.*?/)?(?P<name>checkpoint-\d{1,12}))/(?P<path>.+)", re.DOTALL)
_READERS = 16  # manifests that are read at the same time


@dataclass
class Folder:
    """One checkpoint folder in the bucket. ``objects`` are by their path below ``prefix``.

    It is a checkpoint only if ``manifest`` is there; ``error`` says why a manifest that is there cannot be used.
    """

    prefix: str
    objects: Dict[str, Stored] = field(default_factory=dict)
    manifest: Optional[Manifest] = None
    error: str = ""

    @property
    def name(self) -> str:
        """``checkpoint-<step>``."""
        return self.prefix.rpartition("/")[2]

    @property
    def run_prefix(self) -> str:
        """The folder of the run."""
        return self.prefix.rpartition("/")[0]

    @property
    def pinned(self) -> bool:
        """Whether somebody wants it kept whatever a policy says."""
        return manifests.PINNED in self.objects

    @property
    def has_manifest(self) -> bool:
        """Whether there is one, readable or not."""
        return manifests.NAME in self.objects

    @property
    def size(self) -> int:
        """All objects, in bytes."""
        return sum(item.size for item in self.objects.values())

    @property
    def modified(self) -> float:
        """When the last object came, in seconds since the epoch by the server's clock."""
        return max((item.modified for item in self.objects.values()), default=0.0)

    def lacking(self) -> Dict[str, str]:
        """What a listing can tell of the manifest's files that are missing or have another size, by path."""
        wrong = {}
        for file in self.manifest.files if self.manifest else []:
            stored = self.objects.get(file.path)
            if stored is None:
                wrong[file.path] = "is not there"
            elif stored.size != file.size:
                wrong[file.path] = f"has {stored.size} bytes, not {file.size}"
        return wrong


def folder_of(key: str) -> str:
    """The prefix of the checkpoint folder that the object ``key`` lies in; ``""``: in none."""
    match = _FOLDER.fullmatch(key)
    return match["prefix"] if match else ""


def survey(target: OssTarget) -> List[Folder]:
    """Every checkpoint folder at or below ``target``, by prefix. A manifest that cannot be used stops nothing.

    Raises:
        StoreError: the bucket cannot be listed.
    """
    bucket = open_bucket(target, connections=_READERS)
    found: Dict[str, Folder] = {}
    for item in list_objects(bucket, target.prefix):
        match = _FOLDER.fullmatch(item.key)
        # "ckpt" must not take "ckpt-old/checkpoint-8" for its own.
        if match and (not target.prefix or (item.key + "/").startswith(target.prefix + "/")):
            folder = found.setdefault(match["prefix"], Folder(match["prefix"]))
            folder.objects[match["path"]] = item
    folders = [found[prefix] for prefix in sorted(found)]
    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(lambda folder: _read(target, bucket, folder), [item for item in folders if item.has_manifest]))
    return folders


def _read(target: OssTarget, bucket: oss2.Bucket, folder: Folder) -> None:
    try:
        folder.manifest = read_manifest(dataclasses.replace(target, prefix=folder.prefix), bucket)
    except StoreError as error:
        folder.error = str(error)
