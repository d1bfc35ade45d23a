"""Requests to the bucket: signing, errors that are safe to show, and the retries that ``oss2`` does not do."""

from __future__ import annotations

import functools
import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional, TypeVar
from urllib.parse import urlsplit

from trainer.protocol import OssTarget

if TYPE_CHECKING:
    import oss2

T = TypeVar("T")

ATTEMPTS = 6
CONNECT_S, READ_S = 10, 120  # seconds without a byte before a request counts as lost

logging.getLogger("oss2").setLevel(logging.CRITICAL)  # it logs what it also raises


class StoreError(RuntimeError):
    """A request that failed for good, or a transfer that could not be proven; the message is safe to show."""


class UnprovenError(StoreError):
    """What arrived is not what was sent; sending again may help."""


class ManifestConflictError(StoreError):
    """Another manifest, of other contents, is already there: two runs write to one place."""


@dataclass(frozen=True)
class Stored:
    """One object. ``size`` in bytes, ``crc64`` as decimal text (``""`` when a listing does not tell).

    ``modified`` is in seconds since the epoch by the server's clock; listings tell it.
    """

    key: str
    size: int
    crc64: str = ""
    etag: str = ""
    modified: float = 0.0


def open_bucket(target: OssTarget) -> oss2.Bucket:
    """The bucket of ``target``, signed with version 4. Nothing is sent yet.

    Raises:
        StoreError: ``oss2`` is not installed here, or the endpoint or region is missing.
    """
    try:
        import oss2
    except ImportError as error:
        raise StoreError(f"oss2 cannot be imported ({error}); ms-swift brings it: pip install oss2") from None
    if not target.endpoint or not target.region or not target.bucket:
        raise StoreError(f"{target.url}: endpoint, region and bucket are all needed")
    keys = target.credentials
    if keys.security_token:
        auth: Any = oss2.StsAuth(keys.access_key_id, keys.access_key_secret, keys.security_token, auth_version="v4")
    else:
        auth = oss2.AuthV4(keys.access_key_id, keys.access_key_secret)
    endpoint = target.endpoint if "://" in target.endpoint else f"https://{target.endpoint}"
    region = target.region[4:] if target.region.startswith("oss-") else target.region
    from trainer.store.options import bucket_with

    return bucket_with(target.options)(
        auth,
        endpoint,
        target.bucket,
        connect_timeout=(CONNECT_S, READ_S),
        enable_crc=False,  # it would be computed a second time; see put_file and get_file
        region=region,
        is_path_style=urlsplit(endpoint).hostname == "localhost",  # oss2 sees this by itself for IP addresses only
    )


def describe(error: BaseException) -> str:
    """An error of ``oss2`` in one line, without the request's headers and without keys."""
    import oss2

    if isinstance(error, oss2.exceptions.RequestError):
        return f"no answer: {error.exception}"
    if isinstance(error, oss2.exceptions.OssError):
        code = error.code or type(error).__name__
        return f"{code}: {error.message or 'no message'} (HTTP {error.status}, request {error.request_id or '-'})"
    return f"{type(error).__name__}: {error}" if not isinstance(error, StoreError) else str(error)


def _is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment."""
    import oss2
    import requests

    if isinstance(error, (oss2.exceptions.RequestError, oss2.exceptions.InconsistentError, UnprovenError)):
        return True
    if isinstance(error, oss2.exceptions.ServerError):
        return bool(error.status >= 500 or error.status in (408, 429))
    return isinstance(error, (requests.exceptions.RequestException, ConnectionError, TimeoutError))


def retrying(action: Callable[[], T], what: str, attempts: int = ATTEMPTS) -> T:
    """Run ``action``; after a passing error wait (0 to 0.5, 1, 2, 4 … s at random) and run it again.

    Raises:
        StoreError: the error is no passing one, or it came ``attempts`` times.
    """
    import oss2

    for attempt in range(attempts):
        try:
            return action()
        except (oss2.exceptions.OssError, StoreError, OSError) as error:
            last = attempt == attempts - 1
            if last or not _is_passing(error):
                if isinstance(error, StoreError) and not isinstance(error, UnprovenError):
                    raise
                raise StoreError(f"{what}: {describe(error)}") from None
            time.sleep(random.uniform(0, min(20.0, 0.5 * 2**attempt)))  # noqa: S311 - jitter, not a secret
    raise AssertionError("attempts must be at least 1")


def head(bucket: oss2.Bucket, key: str) -> Optional[Stored]:
    """Size and CRC64 of an object as the server tells them; ``None`` when it is not there."""
    import oss2

    def ask() -> Optional[Stored]:
        try:
            answer = bucket.head_object(key)
        except oss2.exceptions.NotFound as error:
            if error.code == "NoSuchBucket":
                raise
            return None
        crc = answer.headers.get("x-oss-hash-crc64ecma", "")
        return Stored(key, answer.content_length, crc, (answer.etag or "").strip('"'))

    return retrying(ask, f"HEAD {key}")


def list_objects(bucket: oss2.Bucket, prefix: str) -> Iterator[Stored]:
    """All objects whose key begins with ``prefix``, by key."""
    token = ""
    while True:
        ask = functools.partial(bucket.list_objects_v2, prefix=prefix, continuation_token=token, max_keys=1000)
        page: Any = retrying(ask, f"listing of {prefix}")
        for item in page.object_list:
            yield Stored(item.key, item.size, "", (item.etag or "").strip('"'), float(item.last_modified or 0))
        if not page.is_truncated:
            return
        token = page.next_continuation_token


def read_bytes(bucket: oss2.Bucket, key: str) -> Optional[bytes]:
    """The content of a small object; ``None`` when it is not there."""
    import oss2

    def read() -> Optional[bytes]:
        try:
            return bytes(bucket.get_object(key).read())
        except oss2.exceptions.NoSuchKey:
            return None

    return retrying(read, f"GET {key}")
