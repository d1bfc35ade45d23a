"""Files into the bucket: parts in parallel, resumed after a kill, and none counted that the server has not proven.

Each byte is read once, in blocks of a megabyte: the memory in use does not depend on the size of file or part.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Optional, Tuple

from trainer.store import crc64
from trainer.store.body import Body, CancelledError
from trainer.store.client import Stored, StoreError, UnprovenError, head, retrying
from trainer.store.journal import Journal
from trainer.store.multipart import PartsError, abort_upload, complete_upload, copy_inside, parts_there
from trainer.store.pace import Pace

if TYPE_CHECKING:
    import oss2

MAX_PARTS = 10_000  # the server's limit
MIN_PART = 100 * 1024  # bytes, the server's limit
MULTIPART_FROM = 16 << 20  # bytes; smaller files go in one request
_MIB = 1 << 20

FileId = Tuple[int, int, int]
Part = Tuple[int, int, int]  # number, offset, length


@dataclass(frozen=True)
class Settings:
    """How to transfer.

    Attributes:
        state_dir: folder of the journals of unfinished uploads.
        part_size: bytes per part; larger where 10 000 parts would not do.
        threads: connections at once.
        pace: the meter, and the cap.
        cancelled: asked between two parts.
    """

    state_dir: str
    part_size: int = 10 * _MIB
    threads: int = 4
    pace: Optional[Pace] = None
    cancelled: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Sent:
    """What became of one file: bytes that were ``sent`` now, or ``copied`` inside the bucket; neither: it was there."""

    stored: Stored
    sent: int = 0
    copied: int = 0


def part_size_for(size: int, wanted: int) -> int:
    """The part size in bytes for a file of ``size`` bytes: ``wanted``, or more where 10 000 parts would not do."""
    wanted = max(wanted, MIN_PART)
    return wanted if size <= wanted * MAX_PARTS else -(-size // MAX_PARTS // _MIB) * _MIB


def file_id(stat: os.stat_result) -> FileId:
    """What changes when a file is written to or replaced: size, modification time, inode."""
    return (stat.st_size, stat.st_mtime_ns, stat.st_ino)


class Upload:
    """One file to one key.

    Args:
        bucket: where.
        key: the object's name.
        path: the file.
        settings: see :class:`Settings`.
        pool: runs the parts; shared by all files of a transfer.
    """

    def __init__(self, bucket: oss2.Bucket, key: str, path: str, settings: Settings, pool: ThreadPoolExecutor) -> None:
        self._bucket, self._key, self._path, self._settings, self._pool = bucket, key, path, settings, pool
        self._pace = settings.pace or Pace()
        self._journal = Journal.of_upload(settings.state_dir, bucket.bucket_name, key)
        self._descriptor = -1
        self._size = 0

    def run(self, known_crc: Optional[int] = None, copy_from: Optional[Stored] = None) -> Sent:
        """Send the file and prove it.

        Args:
            known_crc: the file's CRC64, where it has been computed already.
            copy_from: an object of the same bytes in the same bucket, which the server can copy.

        Raises:
            StoreError: it could not be sent or proven, or the file changed meanwhile.
            OSError: the file cannot be read.
        """
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            before = file_id(os.fstat(self._descriptor))
            self._size = before[0]
            sent = self._run(before, known_crc, copy_from)
            # By its name as well: a file that was replaced is another one than the one that is open here.
            if file_id(os.fstat(self._descriptor)) != before or file_id(os.stat(self._path)) != before:
                raise StoreError(f"{self._path} changed while it was sent")
            return sent
        finally:
            os.close(self._descriptor)

    def _run(self, before: FileId, known_crc: Optional[int], copy_from: Optional[Stored]) -> Sent:
        there = head(self._bucket, self._key)
        if there is not None and there.size == self._size:
            if known_crc is None:
                known_crc = crc64.of_range(self._descriptor, 0, self._size)
            if there.crc64 == str(known_crc):
                self._pace.skip(self._size)
                self._forget()
                return Sent(there)
        if copy_from is not None and known_crc is not None:
            with contextlib.suppress(StoreError):  # a saving, never a need: what cannot be copied is sent
                copy_inside(self._bucket, copy_from, self._key)
                copied = head(self._bucket, self._key)
                if copied is not None and (copied.size, copied.crc64) == (self._size, str(known_crc)):
                    self._pace.skip(self._size)
                    self._forget()
                    return Sent(copied, copied=self._size)
        return retrying(functools.partial(self._send, before), f"PUT {self._key}")

    def _send(self, before: FileId) -> Sent:
        if self._size < MULTIPART_FROM or self._size <= self._settings.part_size:
            self._check()
            crc, sent = self._pool.submit(self._put_whole).result(), self._size
        else:
            crc, sent = self._put_parts(before)
        stored = head(self._bucket, self._key)
        if stored is None or (stored.size, stored.crc64) != (self._size, str(crc)):
            self._pace.skip(-sent)
            raise UnprovenError(f"the server holds other bytes than {self._path}: {stored}")
        self._forget()
        return Sent(stored, sent)

    def _check(self) -> None:
        if self._settings.cancelled():
            raise CancelledError("the transfer was told to stop")

    # -- in one request ------------------------------------------------------------------------------------------

    def _put_whole(self) -> int:
        body = self._body(0, self._size)
        self._request(lambda: self._bucket.put_object(self._key, body if self._size else b""), body)
        return body.crc

    def _body(self, offset: int, length: int) -> Body:
        return Body(self._descriptor, offset, length, self._pace, self._settings.cancelled)

    def _request(self, send: Callable[[], Any], body: Body) -> Any:
        """Send a body until the server has the same bytes of it."""

        def attempt() -> Any:
            try:
                answer = send()
                if answer.crc is not None and answer.crc != body.crc:
                    raise UnprovenError(f"the server received other bytes than those of {self._path}")
            except BaseException:
                body.give_back()
                raise
            return answer

        return retrying(attempt, f"PUT {self._key}")

    # -- in parts ------------------------------------------------------------------------------------------------

    def _put_parts(self, before: FileId) -> Tuple[int, int]:
        """CRC64 of all parts together, and the bytes that were sent now."""
        upload_id, parts, done = self._resume(before)
        failed = threading.Event()

        def send(part: Part) -> Tuple[str, int]:
            number, offset, length = part
            if failed.is_set():
                raise CancelledError("another part has failed")
            try:
                self._check()
                body = self._body(offset, length)
                answer = self._request(lambda: self._bucket.upload_part(self._key, upload_id, number, body), body)
                self._journal.note(number, answer.etag, body.crc)
                return answer.etag, body.crc
            except BaseException:
                failed.set()
                raise

        missing = [part for part in parts if part[0] not in done]
        try:
            for part, result in zip(missing, _gather([self._pool.submit(send, part) for part in missing])):
                done[part[0]] = result
        except StoreError as error:
            if "NoSuchUpload" in str(error):  # completed or aborted by someone else: the head tells which
                self._forget()
                raise UnprovenError(str(error)) from None
            raise
        crc = 0
        for number, _, length in parts:
            crc = crc64.combine(crc, done[number][1], length)
        try:
            numbered = [(number, done[number][0]) for number, _, _ in parts]
            complete_upload(self._bucket, self._key, upload_id, numbered)
        except PartsError as error:
            self.abort()  # from the beginning
            raise UnprovenError(str(error)) from None
        return crc, sum(length for _, _, length in missing)

    def _resume(self, before: FileId) -> Tuple[str, List[Part], Dict[int, Tuple[str, int]]]:
        """The upload to go on with, its parts, and those of them that are proven: noted, in the file, and there."""
        wanted = {"key": self._key, "file": list(before)}
        known = self._journal.head()
        if known is not None and {name: known.get(name) for name in wanted} == wanted:
            there = parts_there(self._bucket, self._key, str(known.get("upload_id")))
            if there is not None:
                parts, noted, done = self._cut(int(known["part_size"])), self._journal.parts(), {}
                for number, offset, length in parts:
                    etag, crc = (noted.get(number) or ["", -1])[:2]
                    if there.get(number) == (etag, length) and self._still_is(offset, length, crc):
                        done[number] = (str(etag), int(crc))
                        self._pace.skip(length)
                return str(known["upload_id"]), parts, done
        elif known is not None:
            self.abort()  # of a file that is no more
        size = part_size_for(self._size, self._settings.part_size)
        upload_id = retrying(lambda: self._bucket.init_multipart_upload(self._key).upload_id, f"POST {self._key}")
        self._journal.begin({**wanted, "part_size": size, "upload_id": upload_id})
        return upload_id, self._cut(size), {}

    def _cut(self, size: int) -> List[Part]:
        return [(n + 1, at, min(size, self._size - at)) for n, at in enumerate(range(0, self._size, size))]

    def _still_is(self, offset: int, length: int, crc: int) -> bool:
        # Reading is hundreds of times cheaper than sending again, and times of files have lied before.
        return crc64.of_range(self._descriptor, offset, length) == crc

    def abort(self) -> None:
        """Drop the upload that the journal speaks of, at the server as well."""
        known = self._journal.head()
        if known is not None and known.get("upload_id"):
            abort_upload(self._bucket, str(known.get("key", self._key)), str(known["upload_id"]))
        self._forget()

    def _forget(self) -> None:
        self._journal.end()


def _gather(futures: List[Any]) -> Iterable[Any]:
    """The results of all; the first real error once all have come to rest, so that nothing runs on behind our back."""
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, CancelledError)), errors[0])
    return [future.result() for future in futures]
