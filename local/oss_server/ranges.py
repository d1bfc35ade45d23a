"""The Range header as OSS reads it: one range, and by default an unusable one is ignored."""

import re

from local.oss_server.errors import OssError

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def parse_range(header: str, size: int, *, standard: bool) -> tuple[int, int] | None:
    """Return first offset and length of the bytes asked for, or None for the whole object.

    Args:
        header: the Range header, empty for none. Of several ranges only the first counts.
        size: the object's size in bytes.
        standard: whether the client sent ``x-oss-range-behavior: standard``: then a range is cut to the object, and
            one that begins beyond it is refused. Otherwise any range not wholly inside gives the whole object.

    Raises:
        OssError: ``InvalidRange``.
    """
    match = _RANGE.fullmatch(header.split(",")[0].strip())
    if not match or not (match[1] or match[2]):
        return None
    if match[1]:
        first, last = int(match[1]), int(match[2]) if match[2] else max(size - 1, int(match[1]))
        if last < first:
            return None
    else:
        first, last = size - int(match[2]), size - 1
        if standard:
            first = max(first, 0)
    if 0 <= first <= last < size:
        return first, last - first + 1
    if not standard:
        return None
    if first >= size or last < first:
        raise OssError("InvalidRange", ActualObjectSize=str(size), RangeRequested=header)
    return first, size - first


def content_range(first: int, length: int, size: int) -> str:
    """Return the Content-Range header of a partial reply."""
    return f"bytes {first}-{first + length - 1}/{size}"
