"""Objects into files: ranges in parallel, resumed after a kill, and in place only when whole and proven."""

from __future__ import annotations

import errno
import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence, Set, Tuple

from trainer.files import PRIVATE_FILE, remove_quietly
from trainer.store import crc64
from trainer.store.client import UnprovenError, retrying
from trainer.store.journal import Journal
from trainer.store.pace import Pace

if TYPE_CHECKING:
    import oss2

PART = 16 << 20  # bytes
_BLOCK = 1 << 20
UNFINISHED = ".download"  # what a file is called until it is whole

Part = Tuple[int, int, int]


class Download:
    """One object into one file.

    Args:
        bucket: where.
        key: the object's name.
        path: the file; it appears when it is whole and proven. Until then ``<path>.download`` grows.
        size: of the object, in bytes.
        crc: its CRC64; ``None``: as the server says.
        pool: runs the parts.
        pace: the meter, and the cap.
    """

    def __init__(
        self, bucket: oss2.Bucket, key: str, path: str, size: int, crc: Optional[int], pool: ThreadPoolExecutor,
        pace: Optional[Pace] = None,
    ) -> None:  # fmt: skip
        self._bucket, self._key, self._path, self._size, self._crc = bucket, key, path, size, crc
        self._pool, self._pace = pool, pace or Pace()
        self._unfinished = path + UNFINISHED
        self._journal = Journal(self._unfinished + ".jsonl")
        self._descriptor = -1
        self._received = 0
        self._lock = threading.Lock()

    def run(self) -> int:
        """Bring it; returns the bytes that came over the network.

        Raises:
            StoreError: it could not be brought or proven.
            OSError: it could not be written.
        """
        if self._is_there():
            self._pace.skip(self._size)
            return 0
        retrying(self._attempt, f"GET {self._key}")
        return self._received

    def _is_there(self) -> bool:
        if self._crc is None or not os.path.isfile(self._path) or os.path.getsize(self._path) != self._size:
            return False
        return crc64.of_file(self._path) == self._crc

    def _attempt(self) -> None:
        self._descriptor = os.open(self._unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            parts = [(n, at, min(PART, self._size - at)) for n, at in enumerate(range(0, self._size, PART))]
            etag, crcs = self._resume(parts)
            self._bring([part for part in parts if part[0] not in crcs], etag, crcs)
            crc = 0
            for number, _, length in parts:
                crc = crc64.combine(crc, crcs[number], length)
            if self._crc is not None and crc != self._crc:
                self._start_over()
                raise UnprovenError(f"{self._key}: what arrived does not have the CRC64 {self._crc}")
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
        os.replace(self._unfinished, self._path)
        self._journal.end()

    def _start_over(self) -> None:
        self._pace.skip(-self._size)
        self._journal.end()
        remove_quietly(self._unfinished)

    def _resume(self, parts: Sequence[Part]) -> Tuple[str, Dict[int, int]]:
        """The ETag that the parts here belong to (empty: none yet), and the CRCs of those that are still proven."""
        wanted = {"key": self._key, "size": self._size, "crc": self._crc, "part": PART}
        known = self._journal.head()
        if known is None or {name: known.get(name) for name in wanted} != wanted:
            self._allocate()
            self._journal.begin(wanted)
            return "", {}
        noted, etag, done = self._journal.parts(), "", {}
        for number, offset, length in parts:
            crc, tag = (noted.get(number) or [-1, ""])[:2]
            if crc >= 0 and etag in ("", tag) and crc64.of_range(self._descriptor, offset, length) == crc:
                done[number], etag = crc, str(tag)
                self._pace.skip(length)
        return etag, done

    def _allocate(self) -> None:
        # A disk that is too small is told now and not after an hour.
        os.ftruncate(self._descriptor, 0)
        try:
            if self._size:
                os.posix_fallocate(self._descriptor, 0, self._size)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise OSError(errno.ENOSPC, f"{self._size:,} bytes of {self._key} do not fit", self._path) from None
            os.ftruncate(self._descriptor, self._size)  # a file system that cannot reserve

    def _bring(self, parts: Sequence[Part], etag: str, crcs: Dict[int, int]) -> None:
        failed = threading.Event()
        tags = [etag] if etag else []

        def bring(part: Part) -> int:
            if failed.is_set():
                raise UnprovenError("another part has failed")
            try:
                crc, tag = retrying(functools.partial(self._part, part), f"GET {self._key}")
                with self._lock:
                    tags.append(tag)
                    if tags[0] != tag:
                        self._start_over()
                        raise UnprovenError(f"{self._key} was replaced while it was fetched")
                self._journal.note(part[0], crc, tag)
                return crc
            except BaseException:
                failed.set()
                raise

        futures = [(part[0], self._pool.submit(bring, part)) for part in parts]
        errors = [error for error in (future.exception() for _, future in futures) if error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, UnprovenError)), errors[0])
        crcs.update({number: future.result() for number, future in futures})

    def _part(self, part: Part) -> Tuple[int, str]:
        import requests
        import urllib3

        _, offset, length = part
        answer = self._bucket.get_object(self._key, byte_range=(offset, offset + length - 1))
        raw = answer.resp.response.raw  # oss2's own reader works in pieces of 8 KiB
        crc, taken = 0, 0
        try:
            while taken < length:
                block = raw.read(min(_BLOCK, length - taken), decode_content=False)
                if not block:
                    break
                crc = crc64.update(crc, block)
                _write_all(self._descriptor, block, offset + taken)
                taken += len(block)
                self._pace.take(len(block))
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            self._pace.skip(-taken)
            raise UnprovenError(f"{self._key}: the connection broke: {error}") from None
        finally:
            with self._lock:
                self._received += taken
            if taken < length:
                raw.close()  # else the rest of the answer would be taken for the next one
        if taken != length:
            self._pace.skip(-taken)
            raise UnprovenError(f"{self._key}: {taken} of {length} bytes came")
        raw.release_conn()
        return crc, (answer.etag or "").strip('"')


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


class Wanted:
    """One object that is to be fetched: ``crc64`` is decimal text; ``""``: whatever the server says."""

    def __init__(self, key: str, path: str, size: int, crc64: str) -> None:
        self.key, self.path, self.size, self.crc64 = key, path, size, crc64


def get_files(
    bucket: oss2.Bucket, wanted: Sequence[Wanted], threads: int = 4, pace: Optional[Pace] = None, at_once: int = 4
) -> int:
    """Bring many objects at once; returns the bytes that came over the network.

    Raises:
        StoreError: the first that could not be brought or proven, once the others have come to rest.
        OSError: a file could not be written.
    """
    for folder in {os.path.dirname(item.path) for item in wanted}:
        os.makedirs(folder, exist_ok=True)
    with ThreadPoolExecutor(threads) as parts, ThreadPoolExecutor(at_once) as pool:
        jobs = [
            pool.submit(Download(bucket, w.key, w.path, w.size, int(w.crc64) if w.crc64 else None, parts, pace).run)
            for w in wanted
        ]
        errors: List[BaseException] = [e for e in (job.exception() for job in jobs) if e is not None]
        if errors:
            raise errors[0]
        _sweep({item.path for item in wanted})
        return sum(job.result() for job in jobs)


def _sweep(paths: Set[str]) -> None:
    """Remove what a receiver that was killed left beside files that are whole by now."""
    for folder in {os.path.dirname(path) for path in paths}:
        with os.scandir(folder) as entries:
            for entry in entries:
                whole = entry.path.rpartition(UNFINISHED)[0]
                if whole in paths and entry.path not in paths:
                    remove_quietly(entry.path)
