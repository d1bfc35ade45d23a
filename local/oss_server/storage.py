"""Buckets and objects on disk."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from local.oss_server.blobs import Blobs, Segment
from local.oss_server.database import Database
from local.oss_server.errors import OssError
from local.oss_server.records import BucketRecord, ObjectRecord, dump, load_object, load_part

_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_KEYS_AT_ONCE = 1000


class Storage:
    """Everything below one folder. Opening it finds what was there and clears what a killed server left half-written.

    Args:
        root: folder, made if missing. One server at a time.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.database = Database(root / "index.db")
        self.blobs = Blobs(root / "blobs")
        self.blobs.sweep(self._segment_names())

    def close(self) -> None:
        """Close the index; files need no closing."""
        self.database.close()

    def _segment_names(self) -> set[str]:
        names: set[str] = set()
        with self.database.transaction() as db:
            for (text,) in db.execute("SELECT record FROM objects"):
                names.update(segment.name for segment in load_object(text).segments)
            for (text,) in db.execute("SELECT record FROM parts"):
                names.update(segment.name for segment in load_part(text).segments)
        return names

    # Buckets

    def create_bucket(self, record: BucketRecord) -> None:
        """Make a bucket; making it again changes nothing.

        Raises:
            OssError: ``InvalidBucketName``.
        """
        if not _BUCKET_NAME.fullmatch(record.name):
            raise OssError("InvalidBucketName", BucketName=record.name)
        with self.database.transaction() as db:
            db.execute("INSERT OR IGNORE INTO buckets VALUES (?, ?)", (record.name, dump(record)))

    def bucket(self, name: str) -> BucketRecord:
        """Return a bucket.

        Raises:
            OssError: ``NoSuchBucket``.
        """
        with self.database.transaction() as db:
            row = db.execute("SELECT record FROM buckets WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise OssError("NoSuchBucket", BucketName=name)
        return BucketRecord(**json.loads(row[0]))

    def buckets(self) -> list[BucketRecord]:
        """Return all buckets by name."""
        with self.database.transaction() as db:
            rows = db.execute("SELECT record FROM buckets ORDER BY name").fetchall()
        return [BucketRecord(**json.loads(text)) for (text,) in rows]

    def delete_bucket(self, name: str) -> None:
        """Remove an empty bucket.

        Raises:
            OssError: ``NoSuchBucket``, or ``BucketNotEmpty`` while it has objects or unfinished uploads.
        """
        with self.database.transaction() as db:
            self.bucket(name)
            for query in ("SELECT 1 FROM objects WHERE bucket = ?", "SELECT 1 FROM uploads WHERE bucket = ?"):
                if db.execute(query, (name,)).fetchone():
                    raise OssError("BucketNotEmpty", BucketName=name)
            db.execute("DELETE FROM buckets WHERE name = ?", (name,))

    # Objects

    def find(self, bucket: str, key: str) -> ObjectRecord | None:
        """Return an object, or None.

        Raises:
            OssError: ``NoSuchBucket``.
        """
        with self.database.transaction() as db:
            self.bucket(bucket)
            row = db.execute(
                "SELECT record FROM objects WHERE bucket = ? AND key = ?", (bucket, key.encode())
            ).fetchone()
        return load_object(row[0]) if row else None

    def get(self, bucket: str, key: str) -> ObjectRecord:
        """Return an object.

        Raises:
            OssError: ``NoSuchBucket`` or ``NoSuchKey``.
        """
        record = self.find(bucket, key)
        if record is None:
            raise OssError("NoSuchKey", Key=key)
        return record

    def open(self, bucket: str, key: str) -> tuple[ObjectRecord, Callable[[], None]]:
        """Return an object whose bytes stay readable until the returned function is called.

        Raises:
            OssError: ``NoSuchBucket`` or ``NoSuchKey``.
        """
        with self.database.transaction():
            record = self.get(bucket, key)
            return record, self.blobs.pin(record.segments)

    def put(self, bucket: str, key: str, record: ObjectRecord, *, forbid_overwrite: bool = False) -> None:
        """Make ``record`` the object of that key, all at once.

        Raises:
            OssError: ``NoSuchBucket``; ``FileAlreadyExists`` if overwriting is forbidden and the key is taken.
        """
        self.blobs.drop(self.replace(bucket, key, record, forbid_overwrite=forbid_overwrite))

    def replace(
        self, bucket: str, key: str, record: ObjectRecord, *, forbid_overwrite: bool = False
    ) -> tuple[Segment, ...]:
        """Do what ``put`` does, but return the files no longer needed, to be dropped once the transaction has ended.

        Raises:
            OssError: as ``put``.
        """
        with self.database.transaction() as db:
            old = self.find(bucket, key)
            if old and forbid_overwrite:
                raise OssError("FileAlreadyExists", Key=key)
            db.execute("INSERT OR REPLACE INTO objects VALUES (?, ?, ?)", (bucket, key.encode(), dump(record)))
        kept = set(record.segments)
        return tuple(segment for segment in (old.segments if old else ()) if segment not in kept)

    def delete(self, bucket: str, key: str) -> bool:
        """Remove an object; return whether it was there.

        Raises:
            OssError: ``NoSuchBucket``.
        """
        with self.database.transaction() as db:
            old = self.find(bucket, key)
            db.execute("DELETE FROM objects WHERE bucket = ? AND key = ?", (bucket, key.encode()))
        if old:
            self.blobs.drop(old.segments)
        return old is not None

    def walk(self, bucket: str, after: bytes) -> Iterator[tuple[bytes, ObjectRecord]]:
        """Yield the objects whose key sorts after ``after``, in key order."""
        while True:
            with self.database.transaction() as db:
                rows = db.execute(
                    "SELECT key, record FROM objects WHERE bucket = ? AND key > ? ORDER BY key LIMIT ?",
                    (bucket, after, _KEYS_AT_ONCE),
                ).fetchall()
            for key, text in rows:
                yield key, load_object(text)
            if len(rows) < _KEYS_AT_ONCE:
                return
            after = rows[-1][0]
