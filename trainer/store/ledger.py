"""What this node has proven to be in the bucket, so that no bytes are read or sent twice."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import asdict, dataclass
from typing import Dict, List, Optional

from trainer.files import PRIVATE_FOLDER, append, read_bytes, write_atomic
from trainer.store import crc64
from trainer.store.client import Stored

HEAD = 1 << 20  # bytes at the beginning of a file, by which files that differ are told apart without reading them
_KEPT = 20_000  # entries; more than a run's checkpoints have files


@dataclass(frozen=True)
class Entry:
    """One proven file: where it lay, what it was then, and the object that holds the same bytes."""

    path: str
    stat: List[int]
    head: int
    crc: int
    key: str
    etag: str = ""

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return self.stat[0]


def stat_of(path: str) -> List[int]:
    """What changes when a file's content may have: size, modification and change time, inode."""
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


class Ledger:
    """The proven files of one place in a bucket, in a file below ``state_dir``. Losing it costs time only."""

    def __init__(self, state_dir: str, place: str) -> None:
        name = hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        self._path = os.path.join(state_dir, "proven", f"{name}.jsonl")
        self._lock = threading.Lock()
        self._by_path: Dict[str, Entry] = {}
        self._by_size: Dict[int, List[Entry]] = {}
        entries = [entry for entry in map(_decode, (read_bytes(self._path) or b"").splitlines()) if entry]
        if len(entries) > _KEPT:
            entries = entries[-_KEPT // 2 :]
            write_atomic(self._path, b"".join(_encode(entry) for entry in entries))
        for entry in entries:
            self._remember(entry)

    def _remember(self, entry: Entry) -> None:
        self._by_path[entry.path] = entry
        self._by_size.setdefault(entry.size, []).append(entry)

    def crc_of(self, path: str) -> Optional[int]:
        """The CRC64 of a file that has not changed since it was proven; ``None`` when that is not known."""
        known = self._by_path.get(path)
        return known.crc if known is not None and known.stat == stat_of(path) else None

    def twins(self, path: str, key: str) -> List[Entry]:
        """Proven objects, newest first, that begin like the file and are as long; ``key`` itself is left out."""
        alike = [entry for entry in self._by_size.get(os.path.getsize(path), []) if entry.key != key]
        if not alike:
            return []
        head = head_of(path)
        return [entry for entry in reversed(alike) if entry.head == head]

    def note(self, path: str, stat: List[int], stored: Stored) -> None:
        """Note that ``stored`` holds the bytes that ``path`` had when it was ``stat``."""
        entry = Entry(path, stat, head_of(path), int(stored.crc64), stored.key, stored.etag)
        with self._lock:
            if self._by_path.get(path) == entry:
                return
            self._remember(entry)
            os.makedirs(os.path.dirname(self._path), mode=PRIVATE_FOLDER, exist_ok=True)
            append(self._path, b"\n" + _encode(entry))


def head_of(path: str) -> int:
    """The CRC64 of a file's beginning."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return crc64.of_range(descriptor, 0, HEAD)
    finally:
        os.close(descriptor)


def _encode(entry: Entry) -> bytes:
    return json.dumps(asdict(entry)).encode() + b"\n"


def _decode(line: bytes) -> Optional[Entry]:
    try:
        entry = Entry(**json.loads(line))
        return entry if len(entry.stat) == 4 and isinstance(entry.crc, int) else None
    except (ValueError, TypeError):
        return None
