"""Files to and from the bucket, each proven by CRC64 of the file here against what the server computed."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Tuple

from trainer.files import PRIVATE_FOLDER
from trainer.store.client import Stored, StoreError, UnprovenError, head, retrying

if TYPE_CHECKING:
    import oss2

MAX_PARTS = 10_000  # the server's limit
MIN_PART = 100 * 1024  # bytes, the server's limit
MULTIPART_FROM = 16 << 20  # bytes; smaller files go in one request
_MIB = 1 << 20


def crc64_of(path: str) -> str:
    """CRC64 (ECMA-182, as OSS computes it) of a file, as decimal text; about 3 s per GB."""
    import oss2

    crc = oss2.utils.Crc64()
    with open(path, "rb") as stream:
        while True:
            block = stream.read(4 * _MIB)
            if not block:
                return str(crc.crc)
            crc.update(block)


def part_size_for(size: int, wanted: int) -> int:
    """The part size in bytes for a file of ``size`` bytes: ``wanted``, or more where 10 000 parts would not do."""
    wanted = max(wanted, MIN_PART)
    return wanted if size <= wanted * MAX_PARTS else -(-size // MAX_PARTS // _MIB) * _MIB


def put_file(
    bucket: oss2.Bucket, key: str, path: str, state_dir: str, part_size: int = 10 * _MIB, threads: int = 4
) -> Tuple[Stored, int]:
    """Send one file and prove it; returns what is stored and how many bytes were sent (0: it was there already).

    An interrupted transfer of a big file goes on where it stopped, by the records in ``state_dir``.

    Raises:
        StoreError: it could not be sent, could not be proven, or the file changed meanwhile.
    """
    before = os.stat(path)
    crc64 = crc64_of(path)
    known = head(bucket, key)
    if known is not None and (known.size, known.crc64) == (before.st_size, crc64):
        return known, 0

    def send() -> Stored:
        _send(bucket, key, path, state_dir, part_size_for(before.st_size, part_size), threads)
        stored = head(bucket, key)
        if stored is None or (stored.size, stored.crc64) != (before.st_size, crc64):
            raise UnprovenError(f"the server holds other bytes than {path}: {stored}")
        return stored

    stored = retrying(send, f"PUT {key}")
    after = os.stat(path)
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise StoreError(f"{path} changed while it was sent")
    return stored, before.st_size


def _send(bucket: oss2.Bucket, key: str, path: str, state_dir: str, part_size: int, threads: int) -> None:
    import oss2

    os.makedirs(state_dir, mode=PRIVATE_FOLDER, exist_ok=True)
    oss2.resumable_upload(
        bucket,
        key,
        path,
        store=oss2.ResumableStore(root=state_dir, dir="uploads"),
        multipart_threshold=max(MULTIPART_FROM, part_size),
        part_size=part_size,
        num_threads=threads,
    )


def get_file(bucket: oss2.Bucket, key: str, path: str, size: int, crc64: str) -> int:
    """Bring one object into the file ``path`` and prove it; returns how many bytes came over the network.

    A part of it that is already in ``path`` is not fetched again.

    Raises:
        StoreError: it could not be fetched or proven; a file that is proven wrong is removed.
    """
    received = 0

    def fetch() -> None:
        nonlocal received
        have = os.path.getsize(path) if os.path.exists(path) else 0
        if have > size:
            os.truncate(path, 0)
            have = 0
        if have < size or size == 0:
            received += _append(bucket, key, path, have)
        if os.path.getsize(path) != size:
            raise UnprovenError(f"{key}: got {os.path.getsize(path)} of {size} bytes")
        if crc64 and crc64_of(path) != crc64:
            os.unlink(path)
            raise UnprovenError(f"{key}: what arrived does not have the CRC64 {crc64}")

    retrying(fetch, f"GET {key}")
    return received


def _append(bucket: oss2.Bucket, key: str, path: str, offset: int) -> int:
    import requests

    answer = bucket.get_object(key, byte_range=(offset, None) if offset else None)
    with open(path, "r+b" if offset else "wb") as stream:
        stream.seek(offset)
        try:
            shutil.copyfileobj(answer, stream, _MIB)
        except requests.exceptions.RequestException as error:
            raise UnprovenError(f"{key}: the connection broke: {error}") from None
        return stream.tell() - offset
