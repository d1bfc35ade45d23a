"""Listings against a model: any keys, prefix, delimiter and page size, both versions of the call."""

from collections.abc import Iterator

import oss2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from local.oss_server import RunningServer
from local.oss_server.listing import list_page
from tests.oss_server.harness import new_bucket

_keys = st.sets(st.text(alphabet="ab/-\x00é中😀", min_size=1, max_size=6), max_size=30)
_texts = st.text(alphabet="ab/-é中", max_size=3)


def model(keys: set[str], prefix: str, delimiter: str, after: str) -> tuple[list[str], list[str]]:
    """Return keys and common prefixes: everything in one page, worked out the plain way."""
    shown, groups = [], []
    for key in sorted(keys, key=str.encode):
        if not key.startswith(prefix) or key.encode() <= after.encode():
            continue
        head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        group = prefix + head + found
        if not found:
            shown.append(key)
        elif group != after and group not in groups:
            groups.append(group)
    return shown, groups


@given(keys=_keys, prefix=_texts, delimiter=_texts, after=_texts, limit=st.integers(1, 7))
@settings(max_examples=300, deadline=None)
def test_pages_of_the_pure_function(keys: set[str], prefix: str, delimiter: str, after: str, limit: int) -> None:
    encoded = sorted(key.encode() for key in keys)

    def walk(lower: bytes) -> Iterator[tuple[bytes, None]]:
        return ((key, None) for key in encoded if key > lower)

    expected = model(keys, prefix, delimiter, after)
    items: list[str] = []
    prefixes: list[str] = []
    marker = after
    while True:
        page = list_page(walk, prefix=prefix, delimiter=delimiter, after=marker, limit=limit)
        assert len(page) <= limit
        items += [key for key, _ in page.items]
        prefixes += page.prefixes
        if not page.truncated:
            break
        assert len(page) == limit
        marker = page.last
    assert (items, prefixes) == expected


@pytest.fixture(scope="module")
def listed(shared_server: RunningServer) -> oss2.Bucket:
    return new_bucket(shared_server)


@given(
    keys=st.sets(st.text(alphabet="ab/ +&中", min_size=1, max_size=4), max_size=8),
    prefix=st.text(alphabet="ab/中", max_size=2),
    delimiter=st.sampled_from(["", "/", "b", "中"]),
    limit=st.integers(1, 5),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_listings_over_the_wire(listed: oss2.Bucket, keys: set[str], prefix: str, delimiter: str, limit: int) -> None:
    keys = {key for key in keys if not key.startswith("/")}
    for key in keys:
        listed.put_object(key, key)
    expected = model(keys, prefix, delimiter, "")
    for iterator in (oss2.ObjectIterator, oss2.ObjectIteratorV2):
        found = list(iterator(listed, prefix=prefix, delimiter=delimiter, max_keys=limit))
        objects = [entry.key for entry in found if not entry.is_prefix()]
        prefixes = [entry.key for entry in found if entry.is_prefix()]
        assert (objects, prefixes) == expected
    if keys:
        listed.batch_delete_objects(sorted(keys))


def test_what_an_entry_says(v4_bucket: oss2.Bucket) -> None:
    put = v4_bucket.put_object("dir/k", b"abc")
    v4_bucket.append_object("dir/log", 0, b"x")
    first = v4_bucket.list_objects(prefix="dir/").object_list
    assert next((e.key, e.size, e.etag, e.type, e.storage_class) for e in first) == (
        "dir/k",
        3,
        put.etag,
        "Normal",
        "Standard",
    )
    assert first[0].owner.id
    assert first[1].type == "Appendable"
    second = v4_bucket.list_objects_v2(prefix="dir/")
    assert second.object_list[0].owner is None
    assert v4_bucket.list_objects_v2(prefix="dir/", fetch_owner=True).object_list[0].owner.id
    after = v4_bucket.list_objects_v2(start_after="dir/k").object_list
    assert [entry.key for entry in after] == ["dir/log"]
    assert [entry.key for entry in v4_bucket.list_objects(marker="dir/k").object_list] == ["dir/log"]


def test_more_keys_than_one_database_page(v4_bucket: oss2.Bucket) -> None:
    names = [f"k{number:04}" for number in range(1005)]
    for name in names:
        v4_bucket.put_object(name, b"")
    assert [entry.key for entry in oss2.ObjectIterator(v4_bucket, max_keys=1000)] == names
    assert len(v4_bucket.list_objects().object_list) == 100
