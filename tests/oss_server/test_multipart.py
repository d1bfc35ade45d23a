"""Multipart uploads through oss2, unchanged, including interrupted and resumed ones."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import oss2
import pytest
import requests
from oss2.exceptions import InvalidArgument, MalformedXml, NoSuchUpload, ServerError
from oss2.models import PartInfo

from local.oss_server import RunningServer
from tests.oss_server.harness import PART, connect, counting, pattern


def _parts(bucket: oss2.Bucket, key: str, upload: str, pieces: list[bytes]) -> list[PartInfo]:
    done = []
    for number, piece in enumerate(pieces, 1):
        sent = bucket.upload_part(key, upload, number, piece)
        done.append(PartInfo(number, sent.etag, size=len(piece), part_crc=sent.crc))
    return done


def _code(caught: pytest.ExceptionInfo[ServerError]) -> str:
    return str(caught.value.code)


def test_parts_become_one_object(bucket: oss2.Bucket) -> None:
    pieces = [pattern(PART, 1), pattern(PART + 77, 2), b"end"]
    headers = {"x-oss-meta-step": "9", "Content-Type": "text/x-parts"}
    upload = bucket.init_multipart_upload("big/one", headers=headers).upload_id
    parts = _parts(bucket, "big/one", upload, pieces)
    assert not bucket.object_exists("big/one")
    done = bucket.complete_multipart_upload("big/one", upload, parts)  # oss2 compares the CRC here
    assert done.etag.endswith("-3")
    got = bucket.get_object("big/one")
    assert got.read() == b"".join(pieces)
    assert (got.headers["x-oss-meta-step"], got.content_type) == ("9", "text/x-parts")
    assert got.headers["x-oss-object-type"] == "Multipart"
    assert bucket.get_object("big/one", byte_range=(PART - 2, PART + 1)).read() == b"".join(pieces)[PART - 2 : PART + 2]
    with pytest.raises(NoSuchUpload):
        bucket.complete_multipart_upload("big/one", upload, parts)


def test_a_part_sent_again_replaces_the_first(bucket: oss2.Bucket) -> None:
    upload = bucket.init_multipart_upload("k").upload_id
    first = bucket.upload_part("k", upload, 1, pattern(PART, 1))
    second = bucket.upload_part("k", upload, 1, b"better")
    listed = bucket.list_parts("k", upload).parts
    assert [(part.part_number, part.etag, part.size) for part in listed] == [(1, second.etag, 6)]
    with pytest.raises(ServerError) as caught:
        bucket.complete_multipart_upload("k", upload, [PartInfo(1, first.etag, size=PART, part_crc=first.crc)])
    assert _code(caught) == "InvalidPart"
    bucket.complete_multipart_upload("k", upload, [PartInfo(1, second.etag, size=6, part_crc=second.crc)])
    assert bucket.get_object("k").read() == b"better"


def test_what_completing_refuses(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    bucket = v4_bucket
    upload = bucket.init_multipart_upload("k").upload_id
    parts = _parts(bucket, "k", upload, [b"small", b"last"])
    with pytest.raises(ServerError) as caught:
        bucket.complete_multipart_upload("k", upload, parts)
    assert _code(caught) == "EntityTooSmall"
    with pytest.raises(ServerError) as caught:
        bucket.complete_multipart_upload("k", upload, [PartInfo(7, parts[0].etag)])
    assert _code(caught) == "InvalidPart"
    with pytest.raises(MalformedXml):
        bucket.complete_multipart_upload("k", upload, [])
    with pytest.raises(InvalidArgument):
        bucket.upload_part("k", upload, 10001, b"x")
    with pytest.raises(NoSuchUpload):
        bucket.upload_part("k", "0" * 32, 1, b"x")
    with pytest.raises(NoSuchUpload):
        bucket.list_parts("other", upload)
    with pytest.raises(ServerError) as caught:
        _complete_unsorted(bucket, upload, parts)
    assert _code(caught) == "InvalidPartOrder"
    bucket.complete_multipart_upload("k", upload, parts[1:], headers={})
    assert bucket.get_object("k").read() == b"last"


def _complete_unsorted(bucket: oss2.Bucket, upload: str, parts: list[PartInfo]) -> None:
    """Complete with parts in falling order, which oss2 itself would sort."""
    body = oss2.xml_utils.to_complete_upload_request(parts[::-1])
    bucket._do("POST", bucket.bucket_name, "k", params={"uploadId": upload}, data=body)


def test_complete_all_needs_no_list(bucket: oss2.Bucket) -> None:
    upload = bucket.init_multipart_upload("k").upload_id
    _parts(bucket, "k", upload, [pattern(PART), b"tail"])
    bucket.complete_multipart_upload("k", upload, None, headers={"x-oss-complete-all": "yes"})
    assert bucket.get_object("k").read() == pattern(PART) + b"tail"


def test_abort_forgets_everything(bucket: oss2.Bucket) -> None:
    upload = bucket.init_multipart_upload("k").upload_id
    bucket.upload_part("k", upload, 1, b"x")
    assert bucket.abort_multipart_upload("k", upload).status == 204
    with pytest.raises(NoSuchUpload):
        bucket.list_parts("k", upload)
    with pytest.raises(NoSuchUpload):
        bucket.abort_multipart_upload("k", upload)
    assert not bucket.list_multipart_uploads().upload_list


def test_pages_of_parts(bucket: oss2.Bucket) -> None:
    upload = bucket.init_multipart_upload("k").upload_id
    for number in (1, 3, 5, 9, 10000):
        bucket.upload_part("k", upload, number, b"x" * number)
    assert [part.part_number for part in oss2.PartIterator(bucket, "k", upload, max_parts=2)] == [1, 3, 5, 9, 10000]
    page = bucket.list_parts("k", upload, marker="3", max_parts=2)
    assert ([part.part_number for part in page.parts], page.is_truncated, page.next_marker) == ([5, 9], True, "9")


def test_pages_of_uploads(bucket: oss2.Bucket) -> None:
    keys = ["a", "a", "a", "b/x", "b/y", "c d"]
    made = sorted((key, bucket.init_multipart_upload(key).upload_id) for key in keys)
    for size in (1, 2, 4, 100):
        listed = [(u.key, u.upload_id) for u in oss2.MultipartUploadIterator(bucket, max_uploads=size)]
        assert listed == made
    assert [u.key for u in oss2.MultipartUploadIterator(bucket, prefix="b/", max_uploads=1)] == ["b/x", "b/y"]
    grouped = bucket.list_multipart_uploads(delimiter="/")
    assert (grouped.prefix_list, len(grouped.upload_list)) == (["b/"], 4)
    assert [u.upload_id for u in oss2.ObjectUploadIterator(bucket, "a", max_uploads=2)] == [
        i for k, i in made if k == "a"
    ]


def test_parts_copied_from_another_object(bucket: oss2.Bucket) -> None:
    source = pattern(PART * 2 + 5, 3)
    bucket.put_object("src ü", source)
    upload = bucket.init_multipart_upload("k").upload_id
    parts = []
    for number, byte_range in enumerate([(0, PART - 1), (PART, PART * 2 + 4)], 1):
        copied = bucket.upload_part_copy(bucket.bucket_name, "src ü", byte_range, "k", upload, number)
        size = byte_range[1] - byte_range[0] + 1
        parts.append(PartInfo(number, copied.etag, size=size, part_crc=copied.crc))
    bucket.complete_multipart_upload("k", upload, parts)
    assert bucket.get_object("k").read() == source


def test_resumable_upload_goes_on_where_it_was_cut(server: RunningServer, bucket: oss2.Bucket, tmp_path: Path) -> None:
    data = pattern(PART * 6 + 10, 4)
    file = tmp_path / "model.bin"
    file.write_bytes(data)
    store = oss2.ResumableStore(root=str(tmp_path / "records"))

    def upload() -> None:
        oss2.resumable_upload(
            bucket, "model", str(file), store=store, multipart_threshold=PART, part_size=PART, num_threads=1
        )

    server.inject(kind="reset", operation="upload_part", skip=3, after_bytes=1000)
    with pytest.raises(oss2.exceptions.RequestError):
        upload()
    parts, initiated = counting(server, "upload_part"), counting(server, "initiate_multipart_upload")
    upload()
    assert (parts(), initiated()) == (4, 0)  # three of seven parts were there
    assert bucket.get_object("model").read() == data


def test_resumable_download_goes_on_where_it_was_cut(
    server: RunningServer, bucket: oss2.Bucket, tmp_path: Path
) -> None:
    data = pattern(PART * 5 + 10, 5)
    bucket.put_object("model", data)
    target = tmp_path / "model.bin"
    store = oss2.ResumableDownloadStore(root=str(tmp_path / "records"))

    def download() -> None:
        oss2.resumable_download(
            bucket, "model", str(target), store=store, multiget_threshold=PART, part_size=PART, num_threads=1
        )

    server.inject(kind="reset", operation="get_object", skip=2, after_bytes=1000)
    with pytest.raises(requests.RequestException):
        download()
    parts = counting(server, "get_object")
    download()
    assert parts() == 4  # two of six parts were there
    assert target.read_bytes() == data


def test_twenty_uploads_that_may_not_overwrite_have_one_winner(server: RunningServer, v4_bucket: oss2.Bucket) -> None:
    uploads = [v4_bucket.init_multipart_upload("k").upload_id for _ in range(20)]
    parts = [_parts(v4_bucket, "k", upload, [str(i).encode()]) for i, upload in enumerate(uploads)]
    barrier = threading.Barrier(20)

    def attempt(number: int) -> str:
        mine = connect(server, v4_bucket.bucket_name)
        mine.object_exists("k")
        barrier.wait()
        try:
            headers = {"x-oss-forbid-overwrite": "true"}
            mine.complete_multipart_upload("k", uploads[number], parts[number], headers=headers)
        except ServerError as error:
            return str(error.code)
        return "won"

    with ThreadPoolExecutor(20) as pool:
        outcomes = list(pool.map(attempt, range(20)))
    assert (outcomes.count("won"), outcomes.count("FileAlreadyExists")) == (1, 19)
    assert v4_bucket.get_object("k").read() == str(outcomes.index("won")).encode()
