"""Proof by reading: every byte of a checkpoint in the bucket, without keeping any of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Dict

from trainer.protocol import Manifest, OssTarget, StoredFile
from trainer.store import crc64
from trainer.store.client import StoreError, UnprovenError, open_bucket, retrying

if TYPE_CHECKING:
    import oss2

_READERS = 4  # objects that are read at the same time
_BLOCK = 1 << 20  # bytes


def verify_bytes(target: OssTarget, manifest: Manifest) -> Dict[str, str]:
    """What is wrong with the content of each file of the manifest, by path; empty = all of it can be had back.

    Raises:
        StoreError: the bucket cannot be used at all.
    """
    bucket = open_bucket(target)
    with ThreadPoolExecutor(_READERS) as pool:
        faults = list(pool.map(lambda file: _fault(bucket, target.key(file.path), file), manifest.files))
    return {file.path: text for file, text in zip(manifest.files, faults) if text}


def _fault(bucket: oss2.Bucket, key: str, file: StoredFile) -> str:
    import oss2
    import requests

    def read() -> str:
        crc, size = 0, 0
        try:
            answer = bucket.get_object(key)
            while True:
                block = answer.read(_BLOCK)
                if not block:
                    break
                crc = crc64.update(crc, block)
                size += len(block)
        except oss2.exceptions.NoSuchKey:
            return "is not there"
        except requests.exceptions.RequestException as error:
            raise UnprovenError(f"{key}: the connection broke: {error}") from None
        if size < (answer.content_length or 0):
            raise UnprovenError(f"{key}: {size} of {answer.content_length} bytes came")
        if (size, str(crc)) != (file.size, file.crc64):
            return f"has {size} bytes with CRC64 {crc}; not {file.size}, {file.crc64}"
        return ""

    try:
        return retrying(read, f"GET {key}")
    except StoreError as error:
        return str(error)
