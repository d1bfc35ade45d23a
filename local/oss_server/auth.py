"""Who sent a request: credentials, the two signature versions, clocks and security tokens."""

import hmac
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from local.oss_server import signing
from local.oss_server.errors import OssError, invalid_argument
from local.oss_server.request import OssRequest
from local.oss_server.xml import iso8601

MAX_SKEW = 900  # seconds
MAX_PRESIGNED_LIFE = 604800  # seconds


@dataclass(frozen=True)
class Credential:
    """A key the server knows.

    Attributes:
        secret: access key secret.
        security_token: of a temporary (STS) key, empty for a permanent one.
        expires_at: Unix time at which a temporary key stops working, None for never.
    """

    secret: str
    security_token: str = ""
    expires_at: float | None = None

    def __repr__(self) -> str:
        return f"Credential(secret='***', security_token='***', expires_at={self.expires_at})"


class Authenticator:
    """Checks that a request was signed with a known key, now, for this region.

    Args:
        credentials: access key id to its secret, or to a ``Credential``. Read at each request, so it may change.
        region: the region a V4 signature must name.
        clock: the server's time, Unix seconds.
    """

    def __init__(
        self, credentials: Mapping[str, str | Credential], region: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._credentials = credentials
        self._region = region
        self._clock = clock

    def check(self, request: OssRequest) -> str:
        """Return the access key id that signed the request.

        Raises:
            OssError: with the code OSS would answer.
        """
        authorization = request.header("authorization")
        if authorization.startswith(signing.V4_ALGORITHM + " "):
            return self._check_v4_header(request, authorization)
        if authorization.startswith("OSS "):
            return self._check_v1_header(request, authorization)
        if authorization:
            raise invalid_argument("Invalid Authorization header.", "Authorization", authorization.split(" ", 1)[0])
        if "x-oss-signature" in request.params:
            return self._check_v4_url(request)
        if "Signature" in request.params:
            return self._check_v1_url(request)
        raise OssError("AccessDenied")

    # Version 1

    def _check_v1_header(self, request: OssRequest, authorization: str) -> str:
        access_key_id, colon, signature = authorization[len("OSS ") :].partition(":")
        if not colon:
            raise invalid_argument("Authorization header is invalid.", "Authorization", "OSS")
        credential = self._credential(access_key_id, request.header("x-oss-security-token"))
        date = request.header("x-oss-date") or request.header("date")
        self._check_skew(_parse_date(date))
        self._compare_v1(request, access_key_id, credential, date, signature)
        return access_key_id

    def _check_v1_url(self, request: OssRequest) -> str:
        access_key_id, expires = request.param("OSSAccessKeyId"), request.param("Expires")
        token = request.param("security-token") or request.header("x-oss-security-token")
        credential = self._credential(access_key_id, token)
        if not expires.isdecimal():
            raise invalid_argument("Invalid Expires parameter.", "Expires", expires)
        self._check_expiry(int(expires))
        self._compare_v1(request, access_key_id, credential, expires, request.param("Signature"))
        return access_key_id

    def _compare_v1(
        self, request: OssRequest, access_key_id: str, credential: Credential, date: str, signature: str
    ) -> None:
        string_to_sign = signing.v1_string(request, date)
        if not _same(signing.v1_signature(credential.secret, string_to_sign), signature):
            raise _mismatch(access_key_id, signature, string_to_sign)

    # Version 4

    def _check_v4_header(self, request: OssRequest, authorization: str) -> str:
        fields = dict(
            pair.strip().partition("=")[::2] for pair in authorization[len(signing.V4_ALGORITHM) :].split(",")
        )
        timestamp = request.header("x-oss-date")
        if not timestamp and (date := _parse_date(request.header("date"))):
            timestamp = datetime.fromtimestamp(date, UTC).strftime("%Y%m%dT%H%M%SZ")
        payload = request.header("x-oss-content-sha256")
        if payload != signing.UNSIGNED_PAYLOAD:
            raise invalid_argument("x-oss-content-sha256 must be UNSIGNED-PAYLOAD.", "x-oss-content-sha256", payload)
        access_key_id, scope = self._scope(fields.get("Credential", ""), timestamp)
        credential = self._credential(access_key_id, request.header("x-oss-security-token"))
        self._check_skew(_parse_date(timestamp))
        additional = _header_names(fields.get("AdditionalHeaders", ""))
        self._compare_v4(
            request, credential, (access_key_id, timestamp, scope), additional, fields.get("Signature", "")
        )
        return access_key_id

    def _check_v4_url(self, request: OssRequest) -> str:
        version = request.param("x-oss-signature-version")
        if version != signing.V4_ALGORITHM:
            raise invalid_argument("Invalid signature version.", "x-oss-signature-version", version)
        timestamp = request.param("x-oss-date")
        access_key_id, scope = self._scope(request.param("x-oss-credential"), timestamp)
        credential = self._credential(access_key_id, request.param("x-oss-security-token"))
        expires, signed_at = request.param("x-oss-expires"), _parse_date(timestamp)
        if not expires.isdecimal() or not 1 <= int(expires) <= MAX_PRESIGNED_LIFE or signed_at is None:
            raise invalid_argument("Invalid x-oss-expires or x-oss-date.", "x-oss-expires", expires)
        if signed_at > self._clock() + MAX_SKEW:
            self._check_skew(signed_at)
        self._check_expiry(signed_at + int(expires))
        additional = _header_names(request.param("x-oss-additional-headers"))
        signature = request.param("x-oss-signature")
        self._compare_v4(request, credential, (access_key_id, timestamp, scope), additional, signature)
        return access_key_id

    def _scope(self, credential: str, timestamp: str) -> tuple[str, str]:
        """Split ``id/date/region/oss/aliyun_v4_request`` into id and scope, and check the scope."""
        access_key_id, _, scope = credential.partition("/")
        match = re.fullmatch(r"(\d{8})/([^/]+)/oss/aliyun_v4_request", scope)
        if not match:
            raise invalid_argument("Invalid Credential in Authorization header.", "Credential", credential)
        if match[2] != self._region:
            raise invalid_argument("Invalid signing region in Authorization header.", "region", match[2])
        if match[1] != timestamp[:8]:
            raise invalid_argument("Invalid signing date in Authorization header.", "date", match[1])
        return access_key_id, scope

    def _compare_v4(
        self,
        request: OssRequest,
        credential: Credential,
        signed_by: tuple[str, str, str],
        additional: frozenset[str],
        signature: str,
    ) -> None:
        access_key_id, timestamp, scope = signed_by
        canonical = signing.v4_canonical_request(request, additional)
        string_to_sign = signing.v4_string(canonical, timestamp, scope)
        if not _same(signing.v4_signature(credential.secret, string_to_sign, scope), signature):
            canonical_text = canonical.decode("latin-1")
            raise _mismatch(access_key_id, signature, string_to_sign, canonical_text)

    # Keys, tokens, clocks

    def _credential(self, access_key_id: str, token: str) -> Credential:
        known = self._credentials.get(access_key_id)
        if known is None:
            raise OssError("InvalidAccessKeyId", OSSAccessKeyId=access_key_id)
        credential = Credential(known) if isinstance(known, str) else known
        if credential.security_token and not token:
            raise OssError("InvalidAccessKeyId", OSSAccessKeyId=access_key_id)
        if not _same(credential.security_token, token):
            raise OssError("InvalidSecurityToken")
        if credential.expires_at is not None and self._clock() >= credential.expires_at:
            raise OssError("SecurityTokenExpired")
        return credential

    def _check_skew(self, moment: float | None) -> None:
        if moment is None:
            raise OssError("AccessDenied", "OSS authentication requires a valid Date.")
        now = self._clock()
        if abs(now - moment) > MAX_SKEW:
            raise too_skewed(moment, now)

    def _check_expiry(self, expires_at: float) -> None:
        now = self._clock()
        if now >= expires_at:
            raise OssError("AccessDenied", "Request has expired.", Expires=iso8601(expires_at), ServerTime=iso8601(now))


def too_skewed(request_time: float, server_time: float) -> OssError:
    """Return the error for a client whose clock is more than 15 minutes off (Unix seconds)."""
    return OssError(
        "RequestTimeTooSkewed",
        MaxAllowedSkewMilliseconds=str(MAX_SKEW * 1000),
        RequestTime=iso8601(request_time),
        ServerTime=iso8601(server_time),
    )


def _same(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode(), right.encode())


def _header_names(joined: str) -> frozenset[str]:
    return frozenset(name.strip().lower() for name in joined.split(";") if name.strip())


def _mismatch(access_key_id: str, signature: str, string_to_sign: bytes, canonical_request: str = "") -> OssError:
    return OssError(
        "SignatureDoesNotMatch",
        OSSAccessKeyId=access_key_id,
        SignatureProvided=signature,
        StringToSign=string_to_sign.decode("utf-8", "replace"),
        StringToSignBytes=string_to_sign.hex(" ").upper(),
        details={"CanonicalRequest": canonical_request} if canonical_request else None,
    )


def _parse_date(text: str) -> float | None:
    """Return the Unix time of an HTTP date or of ``20261231T235959Z``, None for anything else."""
    try:
        return datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None
