"""Object bytes on disk: write-once files that objects point at, under names the server makes up.

A key never becomes a path. An object is a list of files, laid end to end, so completing a multipart upload and
appending move no bytes; copying makes hard links.
"""

import hashlib
import os
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from local.oss_server import crc64

READ_CHUNK = 1 << 20  # bytes


@dataclass(frozen=True)
class Segment:
    """One file of bytes: its name in the blob folder and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Written:
    """What was received: the file, its MD5 (16 bytes) and its CRC-64."""

    segment: Segment
    md5: bytes
    crc64: int


class BlobWriter:
    """Writes one file, computing its digests on the way."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb")
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._crc64 = 0
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data)
        self._md5.update(data)
        self._crc64 = crc64.update(self._crc64, data)
        self._size += len(data)

    def finish(self) -> Written:
        """Close the file and return what it holds."""
        self._file.close()
        return Written(Segment(self._path.name, self._size), self._md5.digest(), self._crc64)

    def discard(self) -> None:
        """Close and remove the file; nothing happens if it is gone."""
        self._file.close()
        self._path.unlink(missing_ok=True)


class Blobs:
    """The folder of files. A file that is being read is removed only when its last reader is done."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = threading.Lock()
        self._readers: Counter[str] = Counter()
        self._doomed: set[str] = set()

    def create(self) -> BlobWriter:
        """Open a new file for writing."""
        return BlobWriter(self._folder / uuid.uuid4().hex)

    def link(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """Return new names for the same bytes, without copying where the file system can link."""
        copies = []
        for segment in segments:
            source, target = self._folder / segment.name, self._folder / uuid.uuid4().hex
            try:
                os.link(source, target)
            except OSError:
                shutil.copyfile(source, target)
            copies.append(Segment(target.name, segment.size))
        return tuple(copies)

    def pin(self, segments: Iterable[Segment]) -> Callable[[], None]:
        """Keep files until the returned function is called, whatever happens to the object."""
        names = [segment.name for segment in segments]
        with self._lock:
            self._readers.update(names)
        return lambda: self._unpin(names)

    def _unpin(self, names: Sequence[str]) -> None:
        with self._lock:
            self._readers.subtract(names)
            gone = [name for name in names if self._readers[name] <= 0]
            for name in gone:
                del self._readers[name]
            unlink = self._doomed.intersection(gone)
            self._doomed -= unlink
        self._unlink(unlink)

    def drop(self, segments: Iterable[Segment]) -> None:
        """Remove files that no object points at any more."""
        names = {segment.name for segment in segments}
        with self._lock:
            busy = {name for name in names if self._readers[name] > 0}
            self._doomed |= busy
        self._unlink(names - busy)

    def _unlink(self, names: Iterable[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def sweep(self, keep: set[str]) -> None:
        """Remove every file not named in ``keep``: what a killed server left half-written."""
        self._unlink({path.name for path in self._folder.iterdir()} - keep)

    def read(self, segments: Sequence[Segment], start: int, length: int) -> Iterator[bytes]:
        """Yield ``length`` bytes from offset ``start``, in chunks of at most 1 MiB."""
        for segment in segments:
            if length <= 0:
                return
            if start >= segment.size:
                start -= segment.size
                continue
            take = min(length, segment.size - start)
            yield from self._read_file(segment.name, start, take)
            start, length = 0, length - take

    def _read_file(self, name: str, start: int, length: int) -> Iterator[bytes]:
        with (self._folder / name).open("rb") as file:
            file.seek(start)
            while length > 0:
                chunk = file.read(min(length, READ_CHUNK))
                if not chunk:
                    raise OSError(f"{name} is shorter than recorded")
                length -= len(chunk)
                yield chunk
