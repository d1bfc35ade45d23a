"""Headers that travel with an object: taken from a request, given back, and the conditions on reading."""

from collections.abc import Mapping
from email.utils import formatdate, parsedate_to_datetime
from urllib.parse import parse_qsl

from local.oss_server.errors import OssError, invalid_argument
from local.oss_server.records import STANDARD, ObjectRecord
from local.oss_server.request import OssRequest

_META = "x-oss-meta-"
_CONTENT_HEADERS = (
    "content-type",
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "expires",
)
_OVERRIDES = {f"response-{name}": name for name in _CONTENT_HEADERS}
_MAX_META_BYTES = 8 * 1024
_MAX_TAGS = 10
_ENCRYPTION = "x-oss-server-side-encryption"
_ENCRYPTION_METHODS = ("AES256", "KMS", "SM4")
_STORAGE_CLASSES = ("Standard", "IA", "Archive", "ColdArchive", "DeepColdArchive")


def stored_headers(request: OssRequest) -> dict[str, str]:
    """Return the headers of a request that the object keeps.

    Raises:
        OssError: ``InvalidArgument`` for more than 8 KiB of user metadata; an encryption that does not exist.
    """
    kept = {name: value for name, value in request.headers.items() if name.startswith(_META)}
    if sum(len(name) - len(_META) + len(value) for name, value in kept.items()) > _MAX_META_BYTES:
        raise invalid_argument("The size of user metadata exceeds 8 KB.", "x-oss-meta-", "")
    kept.update({name: request.headers[name] for name in _CONTENT_HEADERS if name in request.headers})
    kept.update(_encryption(request))
    kept.setdefault("content-type", "application/octet-stream")
    return kept


def _encryption(request: OssRequest) -> dict[str, str]:
    """Return the encryption that is asked for; it is told again with the object, the bytes stay as they are."""
    method, key_id = request.header(_ENCRYPTION), request.header(f"{_ENCRYPTION}-key-id")
    if not method:
        return {}
    if method not in _ENCRYPTION_METHODS or (key_id and method != "KMS"):
        raise OssError("InvalidEncryptionAlgorithmError")
    return {_ENCRYPTION: method} | ({f"{_ENCRYPTION}-key-id": key_id} if key_id else {})


def storage_class(request: OssRequest) -> str:
    """Return the storage class a request asks for.

    Raises:
        OssError: ``InvalidArgument``.
    """
    asked = request.header("x-oss-storage-class") or STANDARD
    if asked not in _STORAGE_CLASSES:
        raise invalid_argument("Invalid storage class.", "x-oss-storage-class", asked)
    return asked


def tags_of_header(request: OssRequest) -> dict[str, str]:
    """Return the tags of an ``x-oss-tagging: a=1&b=2`` header.

    Raises:
        OssError: ``InvalidArgument`` for more than ten.
    """
    return checked_tags(dict(parse_qsl(request.header("x-oss-tagging"), keep_blank_values=True)))


def checked_tags(tags: dict[str, str]) -> dict[str, str]:
    """Return ``tags`` if there are at most ten.

    Raises:
        OssError: ``InvalidArgument``.
    """
    if len(tags) > _MAX_TAGS:
        raise invalid_argument("Object tags cannot be more than 10.", "x-oss-tagging", str(len(tags)))
    return tags


def forbids_overwrite(request: OssRequest) -> bool:
    """Return whether the request says ``x-oss-forbid-overwrite: true``."""
    return request.header("x-oss-forbid-overwrite").lower() == "true"


def identity_headers(record: ObjectRecord) -> dict[str, str]:
    """Return the headers by which a client knows an object's bytes."""
    return {"ETag": f'"{record.etag}"', "x-oss-hash-crc64ecma": str(record.crc64)}


def http_date(moment: float) -> str:
    """Return Unix seconds as an HTTP date."""
    return formatdate(moment, usegmt=True)


def reply_headers(record: ObjectRecord, overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the headers with which an object is read.

    Args:
        record: the object.
        overrides: the request's parameters, of which ``response-content-type`` and its like count.
    """
    headers = dict(record.headers)
    headers.update({_OVERRIDES[name]: value for name, value in overrides.items() if name in _OVERRIDES and value})
    headers.update(identity_headers(record))
    headers["Last-Modified"] = http_date(record.modified)
    headers["Accept-Ranges"] = "bytes"
    headers["x-oss-object-type"] = record.kind
    headers["x-oss-storage-class"] = record.storage_class
    if record.tags:
        headers["x-oss-tagging-count"] = str(len(record.tags))
    if record.kind == "Appendable":
        headers["x-oss-next-append-position"] = str(record.size)
    return headers


def check_conditions(request: OssRequest, record: ObjectRecord, prefix: str = "") -> None:
    """Check ``If-Match`` and its like.

    Args:
        request: the request.
        record: the object to be read.
        prefix: ``x-oss-copy-source-`` for the conditions on a copy's source.

    Raises:
        OssError: ``PreconditionFailed`` or ``NotModified``.
    """
    wanted = request.header(f"{prefix}if-match")
    if wanted and not _names(wanted, record.etag):
        raise OssError("PreconditionFailed", Condition="If-Match")
    unmodified_since = _moment(request.header(f"{prefix}if-unmodified-since"))
    if unmodified_since is not None and int(record.modified) > unmodified_since:
        raise OssError("PreconditionFailed", Condition="If-Unmodified-Since")
    unwanted = request.header(f"{prefix}if-none-match")
    if unwanted and _names(unwanted, record.etag):
        raise _not_modified(record)
    modified_since = _moment(request.header(f"{prefix}if-modified-since"))
    if modified_since is not None and int(record.modified) <= modified_since:
        raise _not_modified(record)


def _not_modified(record: ObjectRecord) -> OssError:
    return OssError("NotModified", headers={"ETag": f'"{record.etag}"', "Last-Modified": http_date(record.modified)})


def _names(header: str, etag: str) -> bool:
    return header == "*" or etag in {part.strip().strip('"').upper() for part in header.split(",")}


def _moment(header: str) -> float | None:
    if not header:
        return None
    try:
        return parsedate_to_datetime(header).timestamp()
    except ValueError:
        return None  # OSS ignores a date it cannot read
