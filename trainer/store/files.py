"""One file to or from the bucket, proven by CRC64. For many at once see ``sender`` and ``download``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Tuple

from trainer.store import crc64
from trainer.store.client import Stored
from trainer.store.download import Wanted, get_files
from trainer.store.upload import Settings, Upload

if TYPE_CHECKING:
    import oss2


def crc64_of(path: str) -> str:
    """CRC64 (ECMA-182, as OSS computes it) of a file, as decimal text.

    Raises:
        OSError: it cannot be read.
    """
    return str(crc64.of_file(path))


def put_file(
    bucket: oss2.Bucket, key: str, path: str, state_dir: str, part_size: int = 10 << 20, threads: int = 4
) -> Tuple[Stored, int]:
    """Send one file and prove it; returns what is stored and how many bytes were sent (0: it was there already).

    An interrupted transfer of a big file goes on where it stopped, by the records in ``state_dir``.

    Raises:
        StoreError: it could not be sent, could not be proven, or the file changed meanwhile.
        OSError: it cannot be read.
    """
    with ThreadPoolExecutor(threads) as pool:
        sent = Upload(bucket, key, path, Settings(state_dir, part_size, threads), pool).run()
    return sent.stored, sent.sent


def get_file(bucket: oss2.Bucket, key: str, path: str, size: int, crc64: str) -> int:
    """Bring one object into the file ``path`` and prove it; returns how many bytes came over the network.

    The file appears when it is whole. What an interrupted call brought is kept beside it and not fetched again.

    Raises:
        StoreError: it could not be fetched or proven.
        OSError: it could not be written.
    """
    return get_files(bucket, [Wanted(key, path, size, crc64)])
