"""Any key, content and metadata come back as they went in."""

from pathlib import Path

import oss2
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from local.oss_server import RunningServer, crc64, running_server
from local.oss_server.errors import OssError
from local.oss_server.ranges import parse_range
from tests.oss_server.harness import KEY_ID, REGION, SECRET, connect, new_bucket

# "." and ".." alone are lost in the client: urllib3 takes them for relative paths.
_keys = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60).filter(
    lambda key: key not in (".", "..") and not key.startswith(("/", "\\"))
)
_metadata = st.dictionaries(
    st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=12),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40),
    max_size=4,
)


@pytest.fixture(scope="module")
def any_bucket(shared_server: RunningServer) -> oss2.Bucket:
    return new_bucket(shared_server)


@given(key=_keys, content=st.binary(max_size=2000), metadata=_metadata)
@example(key="../../etc/passwd", content=b"", metadata={})
@example(key="a/./b//c/", content=b"x", metadata={"a": "1"})
@example(key="line\nfeed\r\x00\x7f", content=b"x", metadata={})
@example(key="%2F+?&=# ", content=b"x", metadata={})
@example(key="中" * 341, content=b"x", metadata={})
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_put_is_got(any_bucket: oss2.Bucket, key: str, content: bytes, metadata: dict[str, str]) -> None:
    headers = {f"x-oss-meta-{name}": value for name, value in metadata.items()}
    any_bucket.put_object(key, content, headers=headers)
    got = any_bucket.get_object(key)
    assert got.read() == content
    assert {name: value for name, value in got.headers.items() if name.startswith("x-oss-meta-")} == headers
    assert [entry.key for entry in any_bucket.list_objects().object_list] == [key]
    any_bucket.copy_object(any_bucket.bucket_name, key, "copy")
    assert any_bucket.get_object("copy").read() == content
    any_bucket.delete_object(key)
    any_bucket.delete_object("copy")
    assert not any_bucket.object_exists(key)


def test_no_key_becomes_a_path(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with running_server(root, {KEY_ID: SECRET}, buckets=["models"], region=REGION) as server:
        bucket = connect(server, "models")
        for key in ("../escape", "a/../../escape", "C:\\escape", "escape/"):
            bucket.put_object(key, b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert not list(root.rglob("*escape*"))


@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_combined_crc_is_the_crc_of_the_whole(first: bytes, second: bytes) -> None:
    combined = crc64.combine(crc64.update(0, first), crc64.update(0, second), len(second))
    assert combined == crc64.update(0, first + second)


def test_crc_check_value() -> None:
    assert crc64.update(0, b"123456789") == 0x995DC9BBDF1939FA


@given(
    size=st.integers(0, 20),
    first=st.none() | st.integers(0, 25),
    last=st.none() | st.integers(0, 25),
    standard=st.booleans(),
)
def test_ranges_stay_inside_the_object(size: int, first: int | None, last: int | None, standard: bool) -> None:
    header = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    if standard and first is not None and first >= size and (last is None or last >= first):
        with pytest.raises(OssError):
            parse_range(header, size, standard=True)
        return
    if standard and first is None and last is not None and (last == 0 or size == 0):
        with pytest.raises(OssError):
            parse_range(header, size, standard=True)
        return
    part = parse_range(header, size, standard=standard)
    if part is not None:
        start, length = part
        assert 0 <= start < start + length <= size
        if first is not None and last is not None and last < size:
            assert (start, length) == (first, last - first + 1)
