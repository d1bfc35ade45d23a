"""Multipart uploads: parts kept on disk until they become an object."""

import hashlib
import json
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from local.oss_server import crc64
from local.oss_server.errors import OssError
from local.oss_server.records import ObjectRecord, PartRecord, UploadRecord, dump, load_part
from local.oss_server.storage import Storage

MIN_PART_SIZE = 100 * 1024  # bytes; OSS's own bound


@dataclass(frozen=True)
class Completion:
    """What a client asks to be put together.

    Attributes:
        parts: part numbers with the ETags the client was given; None for all parts that arrived.
        forbid_overwrite: refuse if the key is taken.
        min_part_size: bytes that every part but the last must have.
        now: Unix seconds, the object's modification time.
    """

    parts: Sequence[tuple[int, str]] | None
    forbid_overwrite: bool
    min_part_size: int
    now: float


class Uploads:
    """The unfinished uploads of a storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._database = storage.database

    def create(self, bucket: str, record: UploadRecord) -> None:
        """Begin an upload.

        Raises:
            OssError: ``NoSuchBucket``.
        """
        with self._database.transaction() as db:
            self._storage.bucket(bucket)
            row = (bucket, record.key.encode(), record.upload_id, dump(record))
            db.execute("INSERT INTO uploads VALUES (?, ?, ?, ?)", row)

    def get(self, bucket: str, key: str, upload_id: str) -> UploadRecord:
        """Return an upload.

        Raises:
            OssError: ``NoSuchBucket`` or ``NoSuchUpload``.
        """
        with self._database.transaction() as db:
            self._storage.bucket(bucket)
            query = "SELECT record FROM uploads WHERE bucket = ? AND key = ? AND id = ?"
            row = db.execute(query, (bucket, key.encode(), upload_id)).fetchone()
        if row is None:
            raise OssError("NoSuchUpload", UploadId=upload_id)
        return UploadRecord(**json.loads(row[0]))

    def put_part(self, bucket: str, key: str, upload_id: str, part: PartRecord) -> None:
        """Keep a part; one of the same number is replaced.

        Raises:
            OssError: ``NoSuchBucket`` or ``NoSuchUpload``.
        """
        with self._database.transaction() as db:
            self.get(bucket, key, upload_id)
            query = "SELECT record FROM parts WHERE id = ? AND number = ?"
            old = db.execute(query, (upload_id, part.number)).fetchone()
            db.execute("INSERT OR REPLACE INTO parts VALUES (?, ?, ?)", (upload_id, part.number, dump(part)))
        if old:
            self._storage.blobs.drop(load_part(old[0]).segments)

    def parts(self, bucket: str, key: str, upload_id: str) -> list[PartRecord]:
        """Return the parts that arrived, by number.

        Raises:
            OssError: ``NoSuchBucket`` or ``NoSuchUpload``.
        """
        with self._database.transaction() as db:
            self.get(bucket, key, upload_id)
            rows = db.execute("SELECT record FROM parts WHERE id = ? ORDER BY number", (upload_id,)).fetchall()
        return [load_part(text) for (text,) in rows]

    def walk(self, bucket: str, after: bytes) -> Iterator[tuple[bytes, list[UploadRecord]]]:
        """Yield each key after ``after`` that has unfinished uploads, with those uploads by id."""
        with self._database.transaction() as db:
            query = "SELECT key, record FROM uploads WHERE bucket = ? AND key > ? ORDER BY key, id"
            rows = db.execute(query, (bucket, after)).fetchall()
        by_key: dict[bytes, list[UploadRecord]] = {}
        for key, text in rows:
            by_key.setdefault(key, []).append(UploadRecord(**json.loads(text)))
        yield from by_key.items()

    def at(self, bucket: str, key: str) -> list[UploadRecord]:
        """Return the unfinished uploads of one key, by id."""
        with self._database.transaction() as db:
            query = "SELECT record FROM uploads WHERE bucket = ? AND key = ? ORDER BY id"
            rows = db.execute(query, (bucket, key.encode())).fetchall()
        return [UploadRecord(**json.loads(text)) for (text,) in rows]

    def abort(self, bucket: str, key: str, upload_id: str) -> None:
        """Forget an upload and remove its parts.

        Raises:
            OssError: ``NoSuchBucket`` or ``NoSuchUpload``.
        """
        with self._database.transaction() as db:
            parts = self.parts(bucket, key, upload_id)
            _forget(db, upload_id)
        for part in parts:
            self._storage.blobs.drop(part.segments)

    def complete(self, bucket: str, key: str, upload_id: str, wanted: Completion) -> ObjectRecord:
        """Turn an upload into an object, all at once; parts that were not asked for are removed.

        Raises:
            OssError: ``NoSuchUpload``, ``InvalidPart``, ``InvalidPartOrder``, ``EntityTooSmall`` or
                ``FileAlreadyExists``.
        """
        with self._database.transaction() as db:
            upload = self.get(bucket, key, upload_id)
            present = {part.number: part for part in self.parts(bucket, key, upload_id)}
            chosen = _choose(present, wanted)
            record = _assemble(upload, chosen, wanted.now)
            replaced = self._storage.replace(bucket, key, record, forbid_overwrite=wanted.forbid_overwrite)
            _forget(db, upload_id)
        unused = set(present) - {part.number for part in chosen}
        leftover = [segment for number in unused for segment in present[number].segments]
        self._storage.blobs.drop([*replaced, *leftover])
        return record


def new_upload_id() -> str:
    """Return an id of the length and alphabet of OSS's own."""
    return uuid.uuid4().hex.upper()


def _forget(db: sqlite3.Connection, upload_id: str) -> None:
    db.execute("DELETE FROM parts WHERE id = ?", (upload_id,))
    db.execute("DELETE FROM uploads WHERE id = ?", (upload_id,))


def _choose(present: dict[int, PartRecord], wanted: Completion) -> list[PartRecord]:
    asked = wanted.parts
    if asked is None:
        asked = [(number, part.etag) for number, part in sorted(present.items())]
    if not asked:
        raise OssError("MalformedXML")
    numbers = [number for number, _ in asked]
    if numbers != sorted(set(numbers)):
        raise OssError("InvalidPartOrder")
    chosen = []
    for number, etag in asked:
        part = present.get(number)
        if part is None or part.etag != etag.strip('"').upper():
            raise OssError("InvalidPart", PartNumber=str(number), ETag=etag)
        chosen.append(part)
    for part in chosen[:-1]:
        if part.size < wanted.min_part_size:
            sizes = {"ProposedSize": str(part.size), "MinSizeAllowed": str(wanted.min_part_size)}
            raise OssError("EntityTooSmall", details=sizes, PartNumber=str(part.number), ETag=part.etag)
    return chosen


def _assemble(upload: UploadRecord, parts: Sequence[PartRecord], now: float) -> ObjectRecord:
    digests = hashlib.md5(b"".join(bytes.fromhex(part.etag) for part in parts), usedforsecurity=False)
    crc = 0
    for part in parts:
        crc = crc64.combine(crc, part.crc64, part.size)
    return ObjectRecord(
        etag=f"{digests.hexdigest().upper()}-{len(parts)}",
        crc64=crc,
        modified=now,
        segments=tuple(segment for part in parts for segment in part.segments),
        headers=upload.headers,
        kind="Multipart",
        storage_class=upload.storage_class,
        tags=upload.tags,
    )
