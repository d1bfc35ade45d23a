"""Deleting in the bucket: what makes a checkpoint real goes first, so that a half-deleted one does not exist."""

from __future__ import annotations

import dataclasses
import functools
from typing import Iterable, List

from trainer import manifest as manifests
from trainer.protocol import OssTarget
from trainer.store.client import StoreError, head, list_objects, open_bucket, retrying
from trainer.store.marks import drop_latest

_BATCH = 1000  # keys in one delete request


def delete_checkpoint(target: OssTarget) -> int:
    """Delete the checkpoint at ``target``, its manifest first; returns how many objects were deleted.

    Raises:
        StoreError: it is pinned; or a request failed, and what is left is no checkpoint any more. An empty prefix is
            refused.
    """
    if not target.prefix:
        raise StoreError(f"{target.url}: refusing to delete a whole bucket")
    bucket, key = open_bucket(target), target.key(manifests.NAME)
    if head(bucket, target.key(manifests.PINNED)) is not None:
        raise StoreError(f"{target.url} is pinned; unpin it first")
    parent, _, name = target.prefix.rpartition("/")
    if parent:
        drop_latest(dataclasses.replace(target, prefix=parent), name)
    count = int(head(bucket, key) is not None)
    retrying(lambda: bucket.delete_object(key), f"DELETE {key}")
    return count + delete_objects(target, [item.key for item in list_objects(bucket, target.prefix + "/")])


def delete_objects(target: OssTarget, keys: Iterable[str]) -> int:
    """Delete objects by key; returns how many.

    Raises:
        StoreError: a request failed; the ones before it are gone.
    """
    bucket, rest = open_bucket(target), list(keys)
    for start in range(0, len(rest), _BATCH):
        batch: List[str] = rest[start : start + _BATCH]
        retrying(functools.partial(bucket.batch_delete_objects, batch), f"DELETE below {target.prefix}")
    return len(rest)
