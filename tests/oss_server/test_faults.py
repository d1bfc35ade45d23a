"""Each fault, as an unchanged client meets it, and the routes that set them."""

import time
from pathlib import Path

import httpx
import oss2
import pytest
import requests
from oss2.exceptions import InconsistentError, RequestError, ServerError

from local.oss_server import RunningServer
from local.oss_server.faults import Fault
from tests.oss_server.harness import ADMIN_TOKEN, PART, pattern

_ADMIN = {"x-admin-token": ADMIN_TOKEN}


def _refusal(call: object, *args: object) -> ServerError:
    assert callable(call)
    with pytest.raises(ServerError) as caught:
        call(*args)
    return caught.value


def _drain(source: oss2.models.GetObjectResult, into: bytearray) -> None:
    while chunk := source.read(10_000):
        into += chunk


def test_status_with_a_count_and_a_match(server: RunningServer, bucket: oss2.Bucket) -> None:
    bucket.put_object("ckpt/1/a", b"x")
    server.inject(kind="status", status=503, method="get", key="ckpt/*", times=2)
    assert bucket.put_object("ckpt/1/a", b"y").status == 200
    for _ in range(2):
        refusal = _refusal(bucket.get_object, "ckpt/1/a")
        assert (refusal.status, refusal.code) == (503, "ServiceUnavailable")
    assert bucket.get_object("ckpt/1/a").read() == b"y"


def test_status_with_its_own_code(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    server.inject(kind="status", status=500, operation="head_object", bucket=v4_bucket.bucket_name)
    refusal = _refusal(v4_bucket.head_object, "k")
    assert (refusal.status, refusal.code) == (500, "InternalError")
    server.inject(kind="status", status=502, code="BadGateway")
    assert _refusal(v4_bucket.list_objects).code == "BadGateway"


def test_status_on_an_upload_that_is_still_sending(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    server.inject(kind="status", status=503, operation="put_object")
    assert _refusal(v4_bucket.put_object, "k", pattern(20 << 20)).status == 503
    assert v4_bucket.put_object("k", b"x").status == 200  # the connection is still good


def test_throttle(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    server.inject(kind="throttle", delay_ms=250)
    refusal = _refusal(v4_bucket.put_object, "k", b"x")
    assert refusal.status == 503
    assert refusal.headers["x-oss-qos-delay-time"] == "250"


@pytest.mark.parametrize(
    ("kind", "code"), [("expired_token", "SecurityTokenExpired"), ("skew", "RequestTimeTooSkewed")]
)
def test_refused_credentials(server: RunningServer, v4_bucket: oss2.Bucket, kind: str, code: str) -> None:
    server.inject(kind=kind)
    refusal = _refusal(v4_bucket.put_object, "k", b"x")
    assert (refusal.status, refusal.code) == (403, code)


@pytest.mark.parametrize("after", [0, 200_000])
def test_reset_while_uploading(server: RunningServer, bucket: oss2.Bucket, after: int) -> None:
    server.inject(kind="reset", operation="put_object", after_bytes=after)
    with pytest.raises(RequestError):
        bucket.put_object("k", pattern(8 << 20))
    assert not bucket.object_exists("k")
    assert bucket.put_object("k", b"x").status == 200


def test_reset_of_a_body_shorter_than_the_bound(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    v4_bucket.put_object("k", b"short")
    server.inject(kind="reset", after_bytes=1000, times=2)
    with pytest.raises(RequestError):
        v4_bucket.put_object("k2", b"short")
    got = v4_bucket.get_object("k")
    with pytest.raises(requests.RequestException):
        got.read()
    assert not v4_bucket.object_exists("k2")


@pytest.mark.parametrize("after", [0, 300_000])
def test_reset_while_downloading(server: RunningServer, v4_bucket: oss2.Bucket, after: int) -> None:
    data = pattern(2 << 20)
    v4_bucket.put_object("k", data)
    server.inject(kind="reset", operation="get_object", after_bytes=after)
    got = v4_bucket.get_object("k")
    received = bytearray()
    with pytest.raises(requests.RequestException):
        _drain(got, received)
    assert bytes(received) == data[: len(received)]
    assert len(received) <= after
    assert v4_bucket.get_object("k").read() == data


def test_reset_before_an_empty_reply(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    server.inject(kind="reset", operation="delete_object")
    with pytest.raises(RequestError):
        v4_bucket.delete_object("k")


def test_slow_both_ways(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    server.inject(kind="slow", bytes_per_second=400_000, times=2)
    began = time.monotonic()
    v4_bucket.put_object("k", b"x" * 200_000)
    middle = time.monotonic()
    assert v4_bucket.get_object("k").read() == b"x" * 200_000
    end = time.monotonic()
    assert 0.4 < middle - began < 5
    assert 0.4 < end - middle < 5


def test_lost_reply_did_the_work(server: RunningServer, bucket: oss2.Bucket) -> None:
    server.inject(kind="lost_reply", method="PUT")
    with pytest.raises(RequestError):
        bucket.put_object("k", b"kept")
    assert bucket.get_object("k").read() == b"kept"

    upload = bucket.init_multipart_upload("k2").upload_id
    sent = bucket.upload_part("k2", upload, 1, b"kept")
    server.inject(kind="lost_reply", operation="complete_multipart_upload")
    parts = [oss2.models.PartInfo(1, sent.etag, size=4, part_crc=sent.crc)]
    with pytest.raises(RequestError):
        bucket.complete_multipart_upload("k2", upload, parts)
    assert bucket.get_object("k2").read() == b"kept"
    assert _refusal(bucket.complete_multipart_upload, "k2", upload, parts).code == "NoSuchUpload"


def test_wrong_crc_is_noticed_by_the_client(server: RunningServer, bucket: oss2.Bucket, tmp_path: Path) -> None:
    server.inject(kind="wrong_crc", operation="put_object")
    with pytest.raises(InconsistentError):
        bucket.put_object("k", b"data")
    server.inject(kind="wrong_crc", operation="upload_part")
    upload = bucket.init_multipart_upload("k").upload_id
    with pytest.raises(InconsistentError):
        bucket.upload_part("k", upload, 1, pattern(PART))
    bucket.put_object("k", b"data")
    server.inject(kind="wrong_crc", operation="get_object")
    with pytest.raises(InconsistentError):
        bucket.get_object_to_file("k", str(tmp_path / "k"))
    assert bucket.get_object("k").read() == b"data"


def test_admin_routes(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    url = f"{server.endpoint}/_faults"
    posted = httpx.post(url, headers=_ADMIN, json=[{"kind": "status", "key": "a*", "skip": 1}, {"kind": "skew"}])
    assert posted.status_code == 201
    first, second = posted.json()["ids"]
    state = httpx.get(url, headers=_ADMIN).json()["faults"]
    assert [(fault["id"], fault["kind"], fault["hits"]) for fault in state] == [
        (first, "status", 0),
        (second, "skew", 0),
    ]
    assert _refusal(v4_bucket.put_object, "a1", b"x").code == "RequestTimeTooSkewed"  # the first let one pass
    assert _refusal(v4_bucket.put_object, "a1", b"x").code == "InternalError"
    assert httpx.delete(url, headers=_ADMIN).status_code == 204
    assert httpx.get(url, headers=_ADMIN).json() == {"faults": []}

    before = httpx.get(f"{server.endpoint}/_stats", headers=_ADMIN).json()
    v4_bucket.put_object("a1", b"12345")
    after = httpx.get(f"{server.endpoint}/_stats", headers=_ADMIN).json()
    assert after["requests"]["put_object"] - before["requests"]["put_object"] == 1
    assert after["bytes_in"] - before["bytes_in"] == 5
    assert after["errors"]["RequestTimeTooSkewed"] >= 1


@pytest.mark.parametrize("headers", [{}, {"x-admin-token": "guess"}])
def test_admin_routes_are_closed_without_the_token(server: RunningServer, headers: dict[str, str]) -> None:
    for path in ("_faults", "_stats"):
        assert httpx.get(f"{server.endpoint}/{path}", headers=headers).status_code == 403
    assert httpx.post(f"{server.endpoint}/_faults", headers=headers, json={"kind": "skew"}).status_code == 403


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ({}, "kind is missing"),
        ({"kind": "explode"}, "explode"),
        ({"kind": "status", "colour": 1}, "colour"),
        ({"kind": "status", "status": 200}, "status"),
        ({"kind": "status", "times": "2"}, "times"),
        ({"kind": "slow", "bytes_per_second": 0}, "bytes_per_second"),
        ({"kind": "status", "key": 1}, "key"),
        ("status", "object"),
    ],
)
def test_a_wrong_fault_is_refused(server: RunningServer, document: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Fault.from_json(document)
    reply = httpx.post(f"{server.endpoint}/_faults", headers=_ADMIN, json=document)
    assert reply.status_code == 400
    assert complaint in reply.json()["error"]


def test_times_null_lasts(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    server.inject(kind="status", operation="get_object", times=None)
    for _ in range(3):
        assert _refusal(v4_bucket.get_object, "k").status == 500
