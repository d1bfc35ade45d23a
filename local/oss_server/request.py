"""What a client asked for: bucket, key, parameters and headers, read from the raw request line."""

import ipaddress
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

from local.oss_server.errors import OssError

MAX_KEY_BYTES = 1023


@dataclass(frozen=True)
class OssRequest:
    """One request, decoded.

    Attributes:
        method: HTTP method, upper case.
        host: the Host header as sent, with its port.
        bucket: bucket name, empty for the service itself.
        key: object key, empty for the bucket itself.
        params: query parameters, decoded; a parameter without a value is the empty string.
        headers: header names in lower case; values as Latin-1 text, which keeps every byte.
    """

    method: str
    host: str
    bucket: str
    key: str
    params: Mapping[str, str]
    headers: Mapping[str, str]

    def header(self, name: str) -> str:
        """Return a header, or the empty string."""
        return self.headers.get(name, "")

    def param(self, name: str) -> str:
        """Return a query parameter, or the empty string."""
        return self.params.get(name, "")


def parse_request(scope: MutableMapping[str, Any]) -> OssRequest:
    """Read an ASGI scope.

    A host such as ``bucket.oss-cn-hangzhou.aliyuncs.com`` names the bucket; an IP address, ``localhost`` and
    ``oss-...`` do not, and then the first part of the path is the bucket.

    Raises:
        OssError: ``InvalidObjectName`` for a key that is not UTF-8 or that OSS does not take.
    """
    headers = {name.decode("latin-1").lower(): value.decode("latin-1").strip() for name, value in scope["headers"]}
    host = headers.get("host", "")
    path = unquote_to_bytes(scope["raw_path"].partition(b"?")[0])[1:]
    bucket = bucket_of_host(host)
    if not bucket:
        first, _, path = path.partition(b"/")
        bucket = first.decode("utf-8", "replace")
    query = parse_qsl(scope["query_string"].decode("ascii", "replace"), keep_blank_values=True)
    return OssRequest(
        method=scope["method"].upper(),
        host=host,
        bucket=bucket,
        key=decode_key(path),
        params=dict(query),
        headers=headers,
    )


def bucket_of_host(host: str) -> str:
    """Return the bucket that a Host header names, or the empty string."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    first, dot, _ = name.partition(".")
    if not dot or first == "oss" or first.startswith("oss-") or name.startswith("["):
        return ""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return first
    return ""


def decode_key(raw: bytes) -> str:
    """Return a key as text, refusing what OSS refuses.

    Raises:
        OssError: ``InvalidObjectName`` for bytes that are not UTF-8, more than 1023 bytes, or a leading slash.
    """
    try:
        key = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise OssError("InvalidObjectName") from error
    if len(raw) > MAX_KEY_BYTES or key.startswith(("/", "\\")):
        raise OssError("InvalidObjectName", Key=key)
    return key
