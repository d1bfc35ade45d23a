"""What a client signs: the strings of signature versions 1 and 4, as pure functions of the request."""

import base64
import hashlib
import hmac
from collections.abc import Collection
from urllib.parse import quote

from local.oss_server.request import OssRequest

V4_ALGORITHM = "OSS4-HMAC-SHA256"
UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"

# Query parameters that are part of a V1 signature.
# fmt: off
V1_SUBRESOURCES = frozenset(
    (
        "accessPoint", "accessPointPolicy", "acl", "append", "asyncFetch", "bucketArchiveDirectRead", "bucketInfo",
        "callback", "callback-var", "cname", "comp", "continuation-token", "cors", "delete", "encryption",
        "endTime", "group", "httpsConfig", "inventory", "inventoryId", "lifecycle", "link", "live", "location",
        "logging", "metaQuery", "objectInfo", "objectMeta", "partNumber", "policy", "position", "publicAccessBlock",
        "qos", "qosInfo", "qosRequester", "redundancyTransition", "referer", "regionList", "replication",
        "replicationLocation", "replicationProgress", "requestPayment", "requesterQosInfo", "resourceGroup",
        "resourcePool", "resourcePoolBuckets", "resourcePoolInfo", "response-cache-control",
        "response-content-disposition", "response-content-encoding", "response-content-language",
        "response-content-type", "response-expires", "restore", "security-token", "sequential", "startTime", "stat",
        "status", "style", "styleName", "symlink", "tagging", "transferAcceleration", "uploadId", "uploads",
        "versionId", "versioning", "versions", "vod", "website", "worm", "wormExtend", "wormId",
        "x-oss-ac-forward-allow", "x-oss-ac-source-ip", "x-oss-ac-subnet-mask", "x-oss-ac-vpc-id",
        "x-oss-access-point-name", "x-oss-async-process", "x-oss-process", "x-oss-redundancy-transition-taskid",
        "x-oss-request-payer", "x-oss-target-redundancy-type", "x-oss-traffic-limit",
        "x-oss-write-get-object-response",
    )
)
# fmt: on


def v1_string(request: OssRequest, date: str) -> bytes:
    """Return the string that signature version 1 signs.

    Args:
        request: the request.
        date: the date line: ``x-oss-date`` or ``Date``, or ``Expires`` of a presigned URL.
    """
    headers = sorted((name, value) for name, value in request.headers.items() if name.startswith("x-oss-"))
    params = sorted((name, value) for name, value in request.params.items() if name in V1_SUBRESOURCES)
    resource = f"/{request.bucket}/{request.key}" if request.bucket else "/"
    if params:
        resource += "?" + "&".join(f"{name}={value}" if value else name for name, value in params)
    head = "\n".join([request.method, request.header("content-md5"), request.header("content-type"), date])
    lines = head + "\n" + "".join(f"{name}:{value}\n" for name, value in headers)
    return lines.encode("latin-1") + resource.encode()


def v1_signature(secret: str, string_to_sign: bytes) -> str:
    """Return the base64 HMAC-SHA1 of a V1 string."""
    return base64.b64encode(hmac.new(secret.encode(), string_to_sign, hashlib.sha1).digest()).decode()


def v4_canonical_request(request: OssRequest, additional_headers: Collection[str]) -> bytes:
    """Return the canonical request that signature version 4 hashes.

    Args:
        request: the request; an ``x-oss-signature`` parameter (presigned URL) is left out.
        additional_headers: lower-case names of the headers that are signed beside the usual ones.
    """
    resource = f"/{request.bucket}/{request.key}" if request.bucket else "/"
    params = sorted(
        (quote(name, safe=""), quote(value, safe=""))
        for name, value in request.params.items()
        if name != "x-oss-signature"
    )
    headers = sorted(
        (name, value)
        for name, value in request.headers.items()
        if name.startswith("x-oss-") or name in ("content-type", "content-md5") or name in additional_headers
    )
    lines = [
        request.method,
        quote(resource, safe="/"),
        "&".join(f"{name}={value}" if value else name for name, value in params),
        "".join(f"{name}:{value}\n" for name, value in headers),
        ";".join(sorted(additional_headers)),
        request.header("x-oss-content-sha256") or UNSIGNED_PAYLOAD,
    ]
    return "\n".join(lines).encode("latin-1")


def v4_string(canonical_request: bytes, timestamp: str, scope: str) -> bytes:
    """Return the string that signature version 4 signs.

    Args:
        canonical_request: from ``v4_canonical_request``.
        timestamp: ``20261231T235959Z``.
        scope: ``date/region/oss/aliyun_v4_request``.
    """
    digest = hashlib.sha256(canonical_request).hexdigest()
    return "\n".join([V4_ALGORITHM, timestamp, scope, digest]).encode()


def v4_signature(secret: str, string_to_sign: bytes, scope: str) -> str:
    """Return the hex HMAC-SHA256 of a V4 string, under the key derived for its scope."""
    key = f"aliyun_v4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return hmac.new(key, string_to_sign, hashlib.sha256).hexdigest()
