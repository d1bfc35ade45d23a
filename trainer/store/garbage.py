"""What nobody will ever finish: objects of checkpoints without a manifest, and multipart uploads that are dead."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Dict, List, Tuple

from trainer import manifest as manifests
from trainer.protocol import OssTarget
from trainer.store.client import StoreError, head, list_uploads, open_bucket, retrying
from trainer.store.deleting import delete_objects
from trainer.store.marks import read_run
from trainer.store.survey import folder_of, survey

if TYPE_CHECKING:
    import oss2


@dataclass
class Leftover:
    """The remains of one upload: objects, unfinished multipart uploads (key, id), or both, of one checkpoint folder.

    ``run`` is what ``run.json`` says of the run; ``touched`` when anything of it came last, in seconds since the epoch.
    """

    prefix: str
    run: Dict[str, str] = field(default_factory=dict)
    keys: List[str] = field(default_factory=list)
    size: int = 0
    touched: float = 0.0
    uploads: List[Tuple[str, str]] = field(default_factory=list)
    has_manifest: bool = False


def find_leftovers(target: OssTarget) -> List[Leftover]:
    """Every remainder below ``target``, however young, by prefix. A folder whose manifest cannot be read is none.

    Raises:
        StoreError: the bucket cannot be read.
    """
    found: Dict[str, Leftover] = {}
    folders = survey(target)
    whole = {folder.prefix for folder in folders if folder.has_manifest}
    for folder in folders:
        if not folder.has_manifest:
            keys = [item.key for item in folder.objects.values()]
            found[folder.prefix] = Leftover(folder.prefix, {}, keys, folder.size, folder.modified)
    bucket = open_bucket(target)
    for key, upload_id, began in list_uploads(bucket, target.prefix + "/" if target.prefix else ""):
        prefix = folder_of(key)
        if prefix:  # an upload of anything else is not ours to judge
            leftover = found.setdefault(prefix, Leftover(prefix, has_manifest=prefix in whole))
            leftover.uploads.append((key, upload_id))
            leftover.touched = max(leftover.touched, began, _newest_part(bucket, key, upload_id))
    runs: Dict[str, Dict[str, str]] = {}
    for leftover in found.values():
        parent = leftover.prefix.rpartition("/")[0]
        if parent not in runs:
            runs[parent] = read_run(dataclasses.replace(target, prefix=parent))
        leftover.run = runs[parent]
    return [found[prefix] for prefix in sorted(found)]


def remove(target: OssTarget, leftover: Leftover) -> int:
    """Delete what was found; returns how many objects and uploads went.

    Raises:
        StoreError: a manifest has come meanwhile, and nothing was deleted; or a request failed.
    """
    import oss2

    bucket = open_bucket(target)
    if not leftover.has_manifest and head(bucket, f"{leftover.prefix}/{manifests.NAME}") is not None:
        raise StoreError(f"oss://{target.bucket}/{leftover.prefix} has become a checkpoint meanwhile; it is left alone")
    for key, upload_id in leftover.uploads:

        def abort(key: str = key, upload_id: str = upload_id) -> None:
            with contextlib.suppress(oss2.exceptions.NoSuchUpload):  # it has ended by itself
                bucket.abort_multipart_upload(key, upload_id)

        retrying(abort, f"DELETE upload of {key}")
    return len(leftover.uploads) + delete_objects(target, leftover.keys)


def _newest_part(bucket: oss2.Bucket, key: str, upload_id: str) -> float:
    """When the last part came: a big file may take longer than any grace."""
    marker, newest = "", 0.0
    while True:
        try:
            page: Any = retrying(
                functools.partial(bucket.list_parts, key, upload_id, marker=marker, max_parts=1000), f"parts of {key}"
            )
        except StoreError:
            return newest  # it has ended by itself
        newest = max([newest, *(float(part.last_modified or 0) for part in page.parts)])
        if not page.is_truncated:
            return newest
        marker = page.next_marker
