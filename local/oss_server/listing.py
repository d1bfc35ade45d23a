"""One page of a listing: prefix, delimiter, marker and limit, over keys in byte order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

# Sorts after every key that begins with a given prefix: UTF-8 has no byte 0xFF.
_PAST = b"\xff"


@dataclass
class Page(Generic[T]):
    """What one listing request returns.

    Attributes:
        items: keys with what they stand for, in order.
        prefixes: common prefixes, in order.
        truncated: whether there is more.
        last: the last key or prefix returned, from which the next page goes on.
    """

    items: list[tuple[str, T]] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    truncated: bool = False
    last: str = ""

    def __len__(self) -> int:
        return len(self.items) + len(self.prefixes)


def list_page(
    walk: Callable[[bytes], Iterator[tuple[bytes, T]]], *, prefix: str, delimiter: str, after: str, limit: int
) -> Page[T]:
    """Return the first ``limit`` entries after ``after``.

    Args:
        walk: yields keys greater than its argument, in byte order, with what they stand for.
        prefix: only keys that begin with it.
        delimiter: keys that have it beyond the prefix are shown once, as the part up to it; empty for none.
        after: the key or common prefix after which to begin; a group whose common prefix this is counts as shown.
        limit: keys and common prefixes together; 0 gives an empty page.
    """
    page: Page[T] = Page()
    start, marker = prefix.encode(), after.encode()
    lower = marker if marker >= start else _just_before(start)
    while limit > 0:
        jump = _fill(page, walk(lower), (start, delimiter.encode(), marker), limit)
        if jump is None:
            break
        lower = jump
    return page


def _just_before(key: bytes) -> bytes:
    """Return bytes below ``key`` such that no valid key lies between."""
    return b"" if not key else key[:-1] + bytes([key[-1] - 1]) + _PAST if key[-1] else key[:-1]


def _fill(
    page: Page[T], rows: Iterator[tuple[bytes, T]], bounds: tuple[bytes, bytes, bytes], limit: int
) -> bytes | None:
    """Add entries until the page is full, the prefix ends, or a group was met: then return where to go on."""
    prefix, delimiter, marker = bounds
    for key, item in rows:
        if not key.startswith(prefix):
            return None
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        group = key[: cut + len(delimiter)] if cut >= 0 else b""
        if group and group == marker:
            return group + _PAST
        if len(page) == limit:
            page.truncated = True
            return None
        page.last = (group or key).decode()
        if group:
            page.prefixes.append(page.last)
            return group + _PAST
        page.items.append((page.last, item))
    return None
