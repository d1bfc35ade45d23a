"""What the server remembers of buckets, objects, uploads and parts, as plain values kept as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from local.oss_server.blobs import Segment

STANDARD = "Standard"


@dataclass(frozen=True)
class BucketRecord:
    """A bucket: name, creation time (Unix seconds) and storage class."""

    name: str
    created: float
    storage_class: str = STANDARD


@dataclass(frozen=True)
class ObjectRecord:
    """An object.

    Attributes:
        etag: upper-case hex, without quotes.
        crc64: CRC-64 of all bytes.
        modified: Unix seconds.
        segments: the files that hold the bytes, in order.
        headers: what is given back on reading: content headers and ``x-oss-meta-*``, lower-case names.
        kind: ``Normal``, ``Multipart`` or ``Appendable``.
        tags: object tags.
    """

    etag: str
    crc64: int
    modified: float
    segments: tuple[Segment, ...]
    headers: Mapping[str, str]
    kind: str = "Normal"
    storage_class: str = STANDARD
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(segment.size for segment in self.segments)


@dataclass(frozen=True)
class UploadRecord:
    """A multipart upload that is under way; the fields are those of the object it will become."""

    upload_id: str
    key: str
    initiated: float
    headers: Mapping[str, str]
    storage_class: str = STANDARD
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PartRecord:
    """One part of an upload: number from 1 to 10000, ETag as of an object, the file that holds it."""

    number: int
    etag: str
    crc64: int
    modified: float
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(segment.size for segment in self.segments)


Record = BucketRecord | ObjectRecord | UploadRecord | PartRecord


def dump(record: Record) -> str:
    """Return a record as JSON."""
    return json.dumps(asdict(record))


def load_object(text: str) -> ObjectRecord:
    """Read back an object."""
    return ObjectRecord(**_with_segments(text))


def load_part(text: str) -> PartRecord:
    """Read back a part."""
    return PartRecord(**_with_segments(text))


def _with_segments(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(text)
    fields["segments"] = tuple(Segment(**segment) for segment in fields["segments"])
    return fields
