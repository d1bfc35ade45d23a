"""Requests to the bucket: signing, errors that are safe to show, and the retries that ``oss2`` does not do."""

from __future__ import annotations

import functools
import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional, Tuple, TypeVar
from urllib.parse import urlsplit

from trainer.protocol import OssCredentials, OssTarget

if TYPE_CHECKING:
    import oss2

T = TypeVar("T")

ATTEMPTS = 8
LONGEST_DELAY_S, THROTTLED_S = 60.0, 600.0  # of one wait that the server asks for; of all of them together
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


class Keyring:
    """The keys that requests are signed with; they may be replaced while a transfer runs. They live in memory only.

    ``oss2`` asks :meth:`get_credentials` before each request.
    """

    def __init__(self, credentials: OssCredentials) -> None:
        self.replace(credentials)

    def replace(self, credentials: OssCredentials) -> None:
        """Sign with these from the next request on."""
        import oss2

        self._keys = oss2.credentials.Credentials(
            credentials.access_key_id, credentials.access_key_secret, credentials.security_token or ""
        )

    def get_credentials(self) -> Any:
        """The present keys, as ``oss2`` wants them."""
        return self._keys


def open_bucket(target: OssTarget, keyring: Optional[Keyring] = None, connections: int = 10) -> oss2.Bucket:
    """The bucket of ``target``, signed with version 4. Nothing is sent yet.

    Args:
        target: where, and how to sign.
        keyring: signs instead of the target's own keys.
        connections: how many are kept open at most.

    Raises:
        StoreError: ``oss2`` is not installed here, or the endpoint or region is missing.
    """
    try:
        import oss2
    except ImportError as error:
        raise StoreError(f"oss2 cannot be imported ({error}); ms-swift brings it: pip install oss2") from None
    if not target.endpoint or not target.region or not target.bucket:
        raise StoreError(f"{target.url}: endpoint, region and bucket are all needed")
    endpoint = target.endpoint if "://" in target.endpoint else f"https://{target.endpoint}"
    region = target.region[4:] if target.region.startswith("oss-") else target.region
    from trainer.store.options import bucket_with

    return bucket_with(target.options)(
        oss2.ProviderAuthV4(keyring or Keyring(target.credentials)),
        endpoint,
        target.bucket,
        session=oss2.Session(pool_size=connections),
        connect_timeout=(CONNECT_S, READ_S),
        enable_crc=False,  # slow, and of each request only; see upload.py and download.py
        region=region,
        is_path_style=urlsplit(endpoint).hostname == "localhost",  # oss2 sees this by itself for IP addresses only
    )


#: What to do about errors that have one cause and one cure, by the server's code.
ADVICE = {
    "RequestTimeTooSkewed": "this machine's clock is wrong by more than 15 minutes: {clock}; let chrony or ntpd set it",
    "SecurityTokenExpired": "the temporary credentials have run out; hand over new ones, or let them live longer",
    "InvalidAccessKeyId": "no such key, or it is disabled: look at the connection",
    "SignatureDoesNotMatch": "the secret is another one than the key's, or the region is wrong: look at the connection",
    "AccessDenied": "the key may not do this here: look at its RAM policy and the bucket's policy",
    "NoSuchBucket": "the bucket does not exist in this region: look at checkpoints.backup and the connection",
    "UserDisable": "the account is in arrears or closed: nothing can be stored until it is paid",
    "QuotaExceeded": "the bucket is full: raise its quota or delete from it",
}


def describe(error: BaseException) -> str:
    """An error of ``oss2`` in one line, without the request's headers and without keys, with advice if there is any."""
    import oss2

    if isinstance(error, oss2.exceptions.RequestError):
        return f"no answer: {error.exception}"
    if isinstance(error, oss2.exceptions.OssError):
        code = error.code or type(error).__name__
        text = f"{code}: {error.message or 'no message'} (HTTP {error.status}, request {error.request_id or '-'})"
        advice = ADVICE.get(code, "").format(clock=_clocks(error.headers.get("Date")))
        return f"{text}. {advice[0].upper()}{advice[1:]}" if advice else text
    return f"{type(error).__name__}: {error}" if not isinstance(error, StoreError) else str(error)


def _clocks(date: Optional[str]) -> str:
    here = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"{here} here" + (f", {date} at the server" if date else "")


def _is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment."""
    import oss2
    import requests

    if isinstance(error, (oss2.exceptions.RequestError, oss2.exceptions.InconsistentError, UnprovenError)):
        return True
    if isinstance(error, oss2.exceptions.ServerError):
        return bool(error.status >= 500 or error.status in (408, 429) or error.code == "RequestTimeout")
    return isinstance(error, (requests.exceptions.RequestException, ConnectionError, TimeoutError))


def _asked_delay(error: BaseException) -> float:
    """The seconds that a throttling server asks to wait (``x-oss-qos-delay-time``, in milliseconds); 0: it does not."""
    headers: Any = getattr(error, "headers", None) or {}
    try:
        return min(LONGEST_DELAY_S, max(0.0, float(headers.get("x-oss-qos-delay-time") or 0) / 1000))
    except (ValueError, AttributeError):
        return 0.0


def retrying(action: Callable[[], T], what: str, attempts: int = 0) -> T:
    """Run ``action``; after a passing error wait (0 to 0.5, 1, 2, 4 … 20 s at random) and run it again.

    A server that asks for a delay gets it, and is asked again for up to ten minutes, however often it throttles.

    Args:
        action: may run many times.
        what: for the message, such as ``PUT some/key``.
        attempts: how many times an error may come; 0: :data:`ATTEMPTS`.

    Raises:
        StoreError: the error is no passing one, or it came ``attempts`` times.
    """
    import oss2

    tries, began = 0, time.monotonic()
    while True:
        try:
            return action()
        except (oss2.exceptions.OssError, StoreError, OSError) as error:
            delay = _asked_delay(error)
            if not delay or time.monotonic() - began > THROTTLED_S:
                tries += 1
            if tries >= (attempts or ATTEMPTS) or not _is_passing(error):
                if isinstance(error, StoreError) and not isinstance(error, UnprovenError):
                    raise
                raise StoreError(f"{what}: {describe(error)}") from None
            # Never sooner than asked; at random beyond, or all threads of all nodes come back at one moment.
            time.sleep(delay + random.uniform(0, max(delay / 2, min(20.0, 0.5 * 2 ** max(tries - 1, 0)))))  # noqa: S311


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


def list_uploads(bucket: oss2.Bucket, prefix: str) -> Iterator[Tuple[str, str, float]]:
    """Unfinished multipart uploads of keys that begin with ``prefix``: key, upload id, seconds since the epoch.

    Raises:
        StoreError: they cannot be listed.
    """
    key_marker = id_marker = ""
    while True:
        ask = functools.partial(
            bucket.list_multipart_uploads, prefix=prefix, key_marker=key_marker, upload_id_marker=id_marker
        )
        page: Any = retrying(ask, f"unfinished uploads below {prefix}")
        for item in page.upload_list:
            yield item.key, item.upload_id, float(item.initiation_date)
        if not page.is_truncated:
            return
        key_marker, id_marker = page.next_key_marker, page.next_upload_id_marker


def read_bytes(bucket: oss2.Bucket, key: str) -> Optional[bytes]:
    """The content of a small object; ``None`` when it is not there."""
    import oss2

    def read() -> Optional[bytes]:
        try:
            return bytes(bucket.get_object(key).read())
        except oss2.exceptions.NoSuchKey:
            return None

    return retrying(read, f"GET {key}")
