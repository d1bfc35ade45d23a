"""Who may come in: both signature versions, presigned URLs, temporary keys, clocks."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import oss2
import pytest
from oss2.credentials import StaticCredentialsProvider
from oss2.exceptions import InvalidArgument, ServerError, SignatureDoesNotMatch

from local.oss_server import Credential, RunningServer, running_server
from local.oss_server.request import OssRequest, bucket_of_host
from local.oss_server.signing import v4_canonical_request, v4_signature, v4_string
from tests.oss_server.harness import KEY_ID, REGION, SECRET, auth, connect, new_bucket


class Clock:
    """A clock that is set by hand, relative to the real one."""

    offset = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys() -> dict[str, str | Credential]:
    return {KEY_ID: SECRET}


@pytest.fixture
def own_server(tmp_path: Path, keys: dict[str, str | Credential], clock: Clock) -> Iterator[RunningServer]:
    with running_server(tmp_path, keys, buckets=["models"], region=REGION, clock=clock) as running:
        yield running


def _refusal(call: object, *args: object) -> ServerError:
    assert callable(call)
    with pytest.raises(ServerError) as caught:
        call(*args)
    return caught.value


@pytest.mark.parametrize("version", ["v1", "v4"])
def test_wrong_secret(server: RunningServer, version: str) -> None:
    name = new_bucket(server).bucket_name
    stranger = connect(server, name, version, secret="guessed")
    with pytest.raises(SignatureDoesNotMatch) as caught:
        stranger.put_object("k", b"v")
    assert caught.value.status == 403
    assert caught.value.details["OSSAccessKeyId"] == KEY_ID
    assert "StringToSign" in caught.value.details
    assert SECRET not in str(caught.value.details)
    with pytest.raises(SignatureDoesNotMatch):
        stranger.head_object("k")


@pytest.mark.parametrize("scheme", [oss2.Auth, oss2.AuthV4])
def test_unknown_key(server: RunningServer, scheme: type[oss2.Auth]) -> None:
    bucket = oss2.Bucket(scheme("nobody", SECRET), server.endpoint, "models", region=REGION)
    assert _refusal(bucket.get_object, "k").code == "InvalidAccessKeyId"


def test_wrong_region(server: RunningServer) -> None:
    bucket = oss2.Bucket(auth("v4"), server.endpoint, "models", region="us-west-1")
    with pytest.raises(InvalidArgument) as caught:
        bucket.get_object("k")
    assert "signing region" in caught.value.message


@pytest.mark.parametrize("version", ["v1", "v4"])
@pytest.mark.parametrize("offset", [-1000, 1000])
def test_clock_off_by_more_than_a_quarter_hour(
    own_server: RunningServer, clock: Clock, version: str, offset: float
) -> None:
    bucket = connect(own_server, "models", version)
    bucket.put_object("k", b"v")
    clock.offset = offset
    refusal = _refusal(bucket.get_object, "k")
    assert (refusal.status, refusal.code) == (403, "RequestTimeTooSkewed")
    assert refusal.details["MaxAllowedSkewMilliseconds"] == "900000"
    clock.offset = offset * 0.8
    assert bucket.get_object("k").read() == b"v"


@pytest.mark.parametrize("version", ["v1", "v4"])
def test_presigned_urls(own_server: RunningServer, clock: Clock, version: str) -> None:
    bucket = connect(own_server, "models", version)
    key = "dir/a b+中.bin"
    put = bucket.sign_url("PUT", key, 60, headers={"Content-Type": "text/plain"})
    assert httpx.put(put, content=b"by url").status_code == 403  # the signed content type is missing
    assert httpx.put(put, content=b"by url", headers={"Content-Type": "text/plain"}).status_code == 200
    get = bucket.sign_url("GET", key, 60, params={"response-content-type": "text/x"}, slash_safe=True)
    got = httpx.get(get)
    assert (got.content, got.headers["content-type"]) == (b"by url", "text/x")
    assert httpx.delete(get).status_code == 403
    assert httpx.get(get.replace("dir", "other")).status_code == 403
    via = connect(own_server, "models", version)
    assert via.get_object_with_url(get).read() == b"by url"
    clock.offset = 61
    expired = httpx.get(get)
    assert (expired.status_code, "Request has expired." in expired.text) == (403, True)


def test_presigned_urls_with_signed_headers(own_server: RunningServer) -> None:
    bucket = connect(own_server, "models")
    url = bucket.sign_url("GET", "k", 60, headers={"x-custom": "1"}, additional_headers=["x-custom"])
    bucket.put_object("k", b"v")
    assert httpx.get(url, headers={"x-custom": "1"}).content == b"v"
    assert httpx.get(url, headers={"x-custom": "2"}).status_code == 403


def test_additional_headers(own_server: RunningServer) -> None:
    class Signing(oss2.AuthV4):
        def _sign_request(self, req: oss2.http.Request, bucket_name: str, key: str) -> None:
            super()._sign_request(req, bucket_name, key, in_additional_headers=["user-agent", "range"])

    bucket = oss2.Bucket(Signing(KEY_ID, SECRET), own_server.endpoint, "models", region=REGION)
    bucket.put_object("k", b"0123")
    assert bucket.get_object("k", byte_range=(1, 2)).read() == b"12"


@pytest.mark.parametrize("version", [oss2.AUTH_VERSION_1, oss2.AUTH_VERSION_4])
def test_temporary_keys(
    own_server: RunningServer, keys: dict[str, str | Credential], clock: Clock, version: str
) -> None:
    keys["STS.1"] = Credential("sts-secret", security_token="token/+=1", expires_at=time.time() + 600)

    def bucket(token: str | None) -> oss2.Bucket:
        sts = oss2.StsAuth("STS.1", "sts-secret", token, version)
        return oss2.Bucket(sts, own_server.endpoint, "models", region=REGION)

    good = bucket("token/+=1")
    good.put_object("k", b"v")
    assert httpx.get(good.sign_url("GET", "k", 60)).content == b"v"
    assert _refusal(bucket("stolen").get_object, "k").code == "InvalidSecurityToken"
    assert _refusal(bucket(None).get_object, "k").code == "InvalidAccessKeyId"
    clock.offset = 601
    refusal = _refusal(good.get_object, "k")
    assert (refusal.status, refusal.code) == (403, "SecurityTokenExpired")
    clock.offset = 0
    keys["STS.1"] = Credential("sts-secret", security_token="token-2")
    assert bucket("token-2").get_object("k").read() == b"v"
    permanent = oss2.Bucket(
        oss2.StsAuth(KEY_ID, SECRET, "spare", version), own_server.endpoint, "models", region=REGION
    )
    assert _refusal(permanent.get_object, "k").code == "InvalidSecurityToken"


def test_provider_credentials(own_server: RunningServer) -> None:
    provider = StaticCredentialsProvider(KEY_ID, SECRET)
    for scheme in (oss2.ProviderAuth, oss2.ProviderAuthV4):
        oss2.Bucket(scheme(provider), own_server.endpoint, "models", region=REGION).put_object("k", b"v")


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("OSS no-colon", "InvalidArgument"),
        ("Basic abc", "InvalidArgument"),
        ("OSS4-HMAC-SHA256 Credential=a/b/c, Signature=0", "InvalidArgument"),
        ("OSS " + KEY_ID + ":AAAA", "AccessDenied"),  # no Date
    ],
)
def test_malformed_authorization(own_server: RunningServer, header: str, code: str) -> None:
    headers = {"Authorization": header, "x-oss-content-sha256": "UNSIGNED-PAYLOAD"}
    reply = httpx.get(f"{own_server.endpoint}/models/k", headers=headers)
    assert f"<Code>{code}</Code>" in reply.text


def test_v4_payload_must_be_declared_unsigned(own_server: RunningServer) -> None:
    headers = {"Authorization": "OSS4-HMAC-SHA256 Credential=a", "x-oss-content-sha256": "abc"}
    assert httpx.get(f"{own_server.endpoint}/models/k", headers=headers).status_code == 400


def test_a_credential_does_not_show_its_secrets() -> None:
    assert "s3cret" not in repr(Credential("s3cret", "s3cret"))


@pytest.mark.parametrize(
    ("host", "bucket"),
    [
        ("127.0.0.1:80", ""),
        ("localhost:80", ""),
        ("[::1]:80", ""),
        ("models.oss-cn-hangzhou.aliyuncs.com", "models"),
        ("models.localhost:80", "models"),
        ("oss-cn-hangzhou.aliyuncs.com", ""),
        ("", ""),
    ],
)
def test_bucket_in_the_host_name(host: str, bucket: str) -> None:
    assert bucket_of_host(host) == bucket


def test_v4_string_is_what_the_documentation_describes() -> None:
    request = OssRequest(
        "PUT",
        "h",
        "bucket",
        "1234+-/123/1.txt",
        {"param1": "value1", "+param1": "value3", "|param1": "value4", "+param2": "", "|param2": "", "param2": ""},
        {"x-oss-head1": "value", "abc": "value", "zabc": "value", "xyz": "value", "content-type": "text/plain"}
        | {"x-oss-date": "20231216T162057Z", "x-oss-content-sha256": "UNSIGNED-PAYLOAD"},
    )
    scope = "20231216/cn-hangzhou/oss/aliyun_v4_request"
    string = v4_string(v4_canonical_request(request, ()), "20231216T162057Z", scope)
    # The vector of Alibaba's own SDKs for this request.
    assert v4_signature("sk", string, scope) == "e21d18daa82167720f9b1047ae7e7f1ce7cb77a31e8203a7d5f4624fa0284afe"
