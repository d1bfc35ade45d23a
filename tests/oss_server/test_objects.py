"""Objects through oss2, unchanged, with both signature versions."""

import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate

import httpx
import oss2
import pytest
from oss2.exceptions import (
    AccessDenied,
    BucketNotEmpty,
    InvalidArgument,
    InvalidDigest,
    InvalidObjectName,
    NoSuchBucket,
    NoSuchKey,
    NotModified,
    ObjectNotAppendable,
    PositionNotEqualToLength,
    PreconditionFailed,
    ServerError,
)

from local.oss_server import RunningServer
from tests.oss_server.harness import auth, connect, new_bucket, pattern


def test_put_and_get_carry_content_type_and_metadata(bucket: oss2.Bucket) -> None:
    headers = {"Content-Type": "text/x-weights", "x-oss-meta-step": "1200", "Cache-Control": "no-cache"}
    put = bucket.put_object("runs/1/model", b"hello", headers=headers)
    assert put.etag == hashlib.md5(b"hello", usedforsecurity=False).hexdigest().upper()
    assert put.request_id

    got = bucket.get_object("runs/1/model")
    assert got.read() == b"hello"
    assert got.content_type == "text/x-weights"
    assert got.headers["x-oss-meta-step"] == "1200"
    assert got.headers["Cache-Control"] == "no-cache"
    assert got.server_crc == got.client_crc == put.crc

    head = bucket.head_object("runs/1/model")
    assert (head.content_length, head.etag, head.object_type) == (5, put.etag, "Normal")
    assert head.headers["x-oss-storage-class"] == "Standard"
    meta = bucket.get_object_meta("runs/1/model")
    assert (meta.content_length, meta.etag) == (5, put.etag)
    assert abs(meta.last_modified - time.time()) < 60


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(0, 3, b"0123"), (2, None, b"23456789"), (None, 3, b"789"), (9, 9, b"9"), (0, 9, b"0123456789")],
)
def test_ranges_inside_the_object(v4_bucket: oss2.Bucket, first: int, last: int, expected: bytes) -> None:
    v4_bucket.put_object("digits", b"0123456789")
    got = v4_bucket.get_object("digits", byte_range=(first, last))
    assert got.status == 206
    assert got.read() == expected
    start = 10 - len(expected) if first is None else first
    assert got.headers["Content-Range"] == f"bytes {start}-{start + len(expected) - 1}/10"


@pytest.mark.parametrize("asked", ["bytes=5-20", "bytes=10-20", "bytes=-11", "byte=0-1", "bytes=4-2"])
def test_unusable_range_gives_the_whole_object(v4_bucket: oss2.Bucket, asked: str) -> None:
    v4_bucket.put_object("digits", b"0123456789")
    got = v4_bucket.get_object("digits", headers={"Range": asked})
    assert (got.status, got.read()) == (200, b"0123456789")


def test_standard_range_behavior(v4_bucket: oss2.Bucket) -> None:
    v4_bucket.put_object("digits", b"0123456789")
    standard = {"x-oss-range-behavior": "standard"}
    assert v4_bucket.get_object("digits", headers={"Range": "bytes=5-20", **standard}).read() == b"56789"
    with pytest.raises(ServerError) as caught:
        v4_bucket.get_object("digits", headers={"Range": "bytes=10-20", **standard})
    assert (caught.value.status, caught.value.code) == (416, "InvalidRange")


def test_conditions(bucket: oss2.Bucket) -> None:
    etag = bucket.put_object("k", b"v").etag
    past, future = formatdate(time.time() - 3600, usegmt=True), formatdate(time.time() + 3600, usegmt=True)
    for passing in (
        {"If-Match": f'"{etag}"'},
        {"If-None-Match": '"0"'},
        {"If-Modified-Since": past},
        {"If-Unmodified-Since": future},
    ):
        assert bucket.get_object("k", headers=passing).read() == b"v"
    for failing in ({"If-Match": '"0"'}, {"If-Unmodified-Since": past}):
        with pytest.raises(PreconditionFailed):
            bucket.get_object("k", headers=failing)
    for unchanged in ({"If-None-Match": etag}, {"If-Modified-Since": future}):
        with pytest.raises(NotModified):
            bucket.get_object("k", headers=unchanged)


def test_absent_things(bucket: oss2.Bucket, server: RunningServer) -> None:
    for read in (bucket.get_object, bucket.head_object, bucket.get_object_meta, bucket.get_object_tagging):
        with pytest.raises(NoSuchKey):
            read("absent")
    assert not bucket.object_exists("absent")
    assert bucket.delete_object("absent").status == 204
    elsewhere = connect(server, "no-such-bucket")
    for call in (elsewhere.list_objects, elsewhere.get_bucket_info, elsewhere.delete_bucket):
        with pytest.raises(NoSuchBucket):
            call()
    for call in (elsewhere.get_object, elsewhere.object_exists, elsewhere.delete_object):
        with pytest.raises(NoSuchBucket):
            call("k")
    with pytest.raises(NoSuchBucket) as caught:
        elsewhere.put_object("k", b"v")
    assert caught.value.details["BucketName"] == "no-such-bucket"
    assert caught.value.details["RequestId"] == caught.value.request_id


def test_content_md5(bucket: oss2.Bucket) -> None:
    right = oss2.utils.content_md5(b"hello")
    assert bucket.put_object("k", b"hello", headers={"Content-MD5": right}).status == 200
    with pytest.raises(InvalidDigest):
        bucket.put_object("k", b"other", headers={"Content-MD5": right})
    assert bucket.get_object("k").read() == b"hello"


def test_chunked_upload_from_an_iterator(bucket: oss2.Bucket) -> None:
    pieces = [pattern(70_000, seed) for seed in range(5)]
    assert bucket.put_object("stream", iter(pieces)).status == 200
    assert bucket.get_object("stream").read() == b"".join(pieces)


def test_empty_object(bucket: oss2.Bucket) -> None:
    assert bucket.put_object("empty", b"").crc == 0
    assert bucket.get_object("empty").read() == b""
    assert bucket.head_object("empty").content_length == 0


def test_delete_many(bucket: oss2.Bucket) -> None:
    keys = ["a", "b/c d", "中文&<>", "absent"]
    for key in keys[:3]:
        bucket.put_object(key, b"x")
    assert bucket.batch_delete_objects(keys).deleted_keys == keys
    assert not bucket.list_objects().object_list


def test_delete_many_quietly(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    v4_bucket.put_object("a", b"x")
    body = "<Delete><Quiet>true</Quiet><Object><Key>a</Key></Object></Delete>"
    request = oss2.http.Request("POST", f"{server.endpoint}/{v4_bucket.bucket_name}/", data=body, region="cn-hangzhou")
    request.params, request.product = {"delete": ""}, "oss"
    auth("v4")._sign_request(request, v4_bucket.bucket_name, "")
    reply = oss2.Session().do_request(request, timeout=10)
    assert (reply.status, reply.read()) == (200, b"")
    assert not v4_bucket.object_exists("a")


def test_copy(bucket: oss2.Bucket, server: RunningServer) -> None:
    source = bucket.put_object("from/a b+中", b"payload", headers={"x-oss-meta-kind": "best"})
    copied = bucket.copy_object(bucket.bucket_name, "from/a b+中", "to")
    assert copied.etag == source.etag
    bucket.delete_object("from/a b+中")
    got = bucket.get_object("to")
    assert got.read() == b"payload"
    assert got.headers["x-oss-meta-kind"] == "best"

    other = new_bucket(server)
    other.copy_object(bucket.bucket_name, "to", "k", headers={"x-oss-metadata-directive": "REPLACE"})
    assert "x-oss-meta-kind" not in other.head_object("k").headers
    bucket.update_object_meta("to", {"x-oss-meta-kind": "worst"})
    assert bucket.head_object("to").headers["x-oss-meta-kind"] == "worst"
    assert bucket.get_object("to").read() == b"payload"
    with pytest.raises(NoSuchKey):
        bucket.copy_object(bucket.bucket_name, "absent", "x")
    with pytest.raises(PreconditionFailed):
        bucket.copy_object(bucket.bucket_name, "to", "x", headers={"x-oss-copy-source-if-match": "0"})


def test_append(bucket: oss2.Bucket) -> None:
    first = bucket.append_object("log", 0, b"one,")
    assert first.next_position == 4
    second = bucket.append_object("log", 4, b"two", init_crc=first.crc)
    assert second.next_position == 7
    got = bucket.get_object("log")
    assert got.read() == b"one,two"
    assert got.server_crc == got.client_crc
    with pytest.raises(PositionNotEqualToLength) as caught:
        bucket.append_object("log", 4, b"again")
    assert caught.value.next_position == 7
    bucket.put_object("plain", b"x")
    with pytest.raises(ObjectNotAppendable):
        bucket.append_object("plain", 1, b"y")


def test_tagging(bucket: oss2.Bucket) -> None:
    bucket.put_object("k", b"v", headers={"x-oss-tagging": "stage=best&run=7"})
    assert bucket.get_object_tagging("k").tag_set.tagging_rule == {"stage": "best", "run": "7"}
    rule = oss2.models.TaggingRule()
    rule.add("stage", "prod")
    bucket.put_object_tagging("k", oss2.models.Tagging(rule))
    assert bucket.get_object_tagging("k").tag_set.tagging_rule == {"stage": "prod"}
    assert bucket.get_object("k").read() == b"v"
    bucket.delete_object_tagging("k")
    assert bucket.get_object_tagging("k").tag_set.tagging_rule == {}


def test_overwriting_can_be_forbidden(bucket: oss2.Bucket) -> None:
    forbid = {"x-oss-forbid-overwrite": "true"}
    bucket.put_object("k", b"first", headers=forbid)
    for attempt in (
        lambda: bucket.put_object("k", b"second", headers=forbid),
        lambda: bucket.copy_object(bucket.bucket_name, "k", "k", headers=forbid),
        lambda: bucket.init_multipart_upload("k", headers=forbid),
    ):
        with pytest.raises(ServerError) as caught:
            attempt()
        assert (caught.value.status, caught.value.code) == (409, "FileAlreadyExists")
    assert bucket.get_object("k").read() == b"first"


def test_twenty_threads_that_may_not_overwrite_have_one_winner(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    barrier = threading.Barrier(20)

    def attempt(number: int) -> int:
        mine = connect(server, v4_bucket.bucket_name)
        mine.object_exists("promoted")  # the connection stands before the race begins
        barrier.wait()
        try:
            mine.put_object("promoted", str(number), headers={"x-oss-forbid-overwrite": "true"})
        except ServerError as error:
            return -1 if error.code == "FileAlreadyExists" else -2
        return number

    with ThreadPoolExecutor(20) as pool:
        outcomes = list(pool.map(attempt, range(20)))
    winners = [number for number in outcomes if number >= 0]
    assert (len(winners), outcomes.count(-1)) == (1, 19)
    assert v4_bucket.get_object("promoted").read() == str(winners[0]).encode()


def test_a_reader_keeps_the_bytes_it_began_with(v4_bucket: oss2.Bucket) -> None:
    old = pattern(8 << 20, 1)
    v4_bucket.put_object("k", old)
    reading = v4_bucket.get_object("k")
    head = reading.read(1000)
    v4_bucket.put_object("k", b"new")
    v4_bucket.delete_object("k")
    assert head + reading.read() == old


def test_keys_oss_does_not_take(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    longest = "k" * 1023
    v4_bucket.put_object(longest, b"x")
    assert v4_bucket.get_object(longest).read() == b"x"
    for key in ("k" * 1024, "/leading", "\\leading"):
        with pytest.raises(InvalidObjectName):
            v4_bucket.put_object(key, b"x")
    assert httpx.get(f"{server.endpoint}/{v4_bucket.bucket_name}/%ff").status_code == 400


def test_buckets(server: RunningServer, bucket: oss2.Bucket) -> None:
    service = oss2.Service(auth("v4"), server.endpoint, region="cn-hangzhou")
    assert bucket.bucket_name in [found.name for found in oss2.BucketIterator(service, max_keys=2)]
    info = bucket.get_bucket_info()
    assert (info.name, info.location, info.acl.grant) == (bucket.bucket_name, "oss-cn-hangzhou", "private")
    assert bucket.get_bucket_location().location == "oss-cn-hangzhou"
    assert bucket.get_bucket_acl().acl == "private"
    bucket.create_bucket()
    bucket.put_object("k", b"abc")
    assert (bucket.get_bucket_stat().object_count, bucket.get_bucket_stat().storage_size_in_bytes) == (1, 3)
    with pytest.raises(BucketNotEmpty):
        bucket.delete_bucket()
    bucket.delete_object("k")
    upload = bucket.init_multipart_upload("k").upload_id
    with pytest.raises(BucketNotEmpty):
        bucket.delete_bucket()
    bucket.abort_multipart_upload("k", upload)
    assert bucket.delete_bucket().status == 204
    with pytest.raises(NoSuchBucket):
        bucket.put_object("k", b"x")
    with pytest.raises(ServerError) as caught:
        bucket._do("PUT", "-bad-", "")  # oss2 would not let such a name through
    assert caught.value.code == "InvalidBucketName"


def test_what_is_not_there_says_so(v4_bucket: oss2.Bucket) -> None:
    with pytest.raises(ServerError) as caught:
        v4_bucket.get_bucket_lifecycle()
    assert (caught.value.status, caught.value.code) == (501, "NotImplemented")
    with pytest.raises(ServerError) as caught:
        v4_bucket.create_bucket(oss2.BUCKET_ACL_PUBLIC_READ)
    assert caught.value.code == "NotImplemented"


def test_wrong_arguments(v4_bucket: oss2.Bucket) -> None:
    with pytest.raises(InvalidArgument) as caught:
        v4_bucket.list_objects(max_keys=1001)
    assert (caught.value.name, caught.value.value) == ("max-keys", "1001")
    with pytest.raises(InvalidArgument):
        v4_bucket.list_objects_v2(continuation_token="%%%")


def test_methods_and_anonymous_requests(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    url = f"{server.endpoint}/{v4_bucket.bucket_name}/k"
    assert "<Code>MethodNotAllowed</Code>" in httpx.patch(url).text
    assert httpx.post(server.endpoint).status_code == 405
    assert "<Code>AccessDenied</Code>" in httpx.get(url).text
    anonymous = oss2.Bucket(oss2.AnonymousAuth(), server.endpoint, v4_bucket.bucket_name)
    with pytest.raises(AccessDenied):
        anonymous.put_object("k", b"x")


def test_virtual_hosted_addresses(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    # A real-looking endpoint, with this server as the proxy: the bucket is in the host name.
    proxies = {"http": server.endpoint}
    name = v4_bucket.bucket_name
    for version in ("v1", "v4"):
        hosted = oss2.Bucket(
            auth(version), "http://oss-cn-hangzhou.example.invalid", name, region="cn-hangzhou", proxies=proxies
        )
        hosted.put_object("a b/_faults", version)
        assert hosted.get_object("a b/_faults").read() == version.encode()
        hosted.put_object("_faults", b"not an admin route")
        assert [found.key for found in hosted.list_objects().object_list] == ["_faults", "a b/_faults"]
    assert v4_bucket.object_exists("_faults")


def test_an_encryption_is_told_with_the_object_and_an_unknown_one_refused(bucket: oss2.Bucket) -> None:
    name = "x-oss-server-side-encryption"
    bucket.put_object("a", b"x", headers={name: "KMS", f"{name}-key-id": "key-1"})
    upload = bucket.init_multipart_upload("b", headers={name: "AES256"})
    part = bucket.upload_part("b", upload.upload_id, 1, b"y")
    bucket.complete_multipart_upload("b", upload.upload_id, [oss2.models.PartInfo(1, part.etag)])
    assert bucket.head_object("a").headers[name] == "KMS"
    assert bucket.head_object("a").headers[f"{name}-key-id"] == "key-1"
    assert bucket.get_object("b").headers[name] == "AES256"
    for wrong in ({name: "ROT13"}, {name: "AES256", f"{name}-key-id": "key-1"}):
        with pytest.raises(ServerError) as caught:
            bucket.put_object("c", b"z", headers=wrong)
        assert (caught.value.status, caught.value.code) == (400, "InvalidEncryptionAlgorithmError")
