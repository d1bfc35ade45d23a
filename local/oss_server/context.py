"""What an operation is given and what it returns."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from local.oss_server.blobs import Written
from local.oss_server.multipart import Uploads
from local.oss_server.request import OssRequest
from local.oss_server.storage import Storage


@dataclass(frozen=True)
class Settings:
    """What a server is started with.

    Attributes:
        region: such as ``cn-hangzhou``; V4 signatures must name it.
        min_part_size: bytes that every part of a multipart upload but the last must have.
        admin_token: opens ``/_faults`` and ``/_stats``; empty closes them.
    """

    region: str
    min_part_size: int
    admin_token: str = ""


@dataclass
class Context:
    """One request on its way through an operation.

    Attributes:
        now: Unix seconds by the server's clock.
        content: a small body, read whole.
        written: a large body, already on disk.
        kept: set by an operation once something points at that body; otherwise it is removed afterwards.
    """

    request: OssRequest
    storage: Storage
    uploads: Uploads
    settings: Settings
    now: float
    content: bytes = b""
    written: Written | None = None
    kept: bool = False

    @property
    def bucket(self) -> str:
        """The bucket of the request."""
        return self.request.bucket

    @property
    def key(self) -> str:
        """The key of the request."""
        return self.request.key

    def received(self) -> Written:
        """Return the large body of the request."""
        if self.written is None:
            raise RuntimeError("this operation receives no body")
        return self.written


@dataclass
class Stream:
    """A reply body read from disk: its length in bytes, the chunks, and what to call when no more is read."""

    length: int
    chunks: Iterator[bytes]
    close: Callable[[], None]


@dataclass
class Reply:
    """An answer: status, headers, and a body in memory or from disk."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | Stream = b""


def xml_reply(document: bytes, headers: Mapping[str, str] | None = None) -> Reply:
    """Return a 200 answer with an XML body."""
    return Reply(200, {"Content-Type": "application/xml", **(headers or {})}, document)
