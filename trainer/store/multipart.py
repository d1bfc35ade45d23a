"""Multipart uploads at the server: the parts it has, putting them together, dropping them; copies inside the bucket."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

from trainer.store.client import Stored, StoreError, describe, retrying

if TYPE_CHECKING:
    import oss2

COPY_PART = 1 << 30  # bytes that the server is asked to copy in one request; more may take it longer than we wait


def parts_there(bucket: oss2.Bucket, key: str, upload_id: str) -> Optional[Dict[int, Tuple[str, int]]]:
    """ETag and size of each part that the server has, by number; ``None`` when it knows no such upload.

    Raises:
        StoreError: it cannot be asked.
    """
    import oss2

    found: Dict[int, Tuple[str, int]] = {}
    marker = ""
    while True:
        ask = functools.partial(bucket.list_parts, key, upload_id, marker=marker)

        def page(ask: Callable[[], Any] = ask) -> Any:
            try:
                return ask()
            except oss2.exceptions.NoSuchUpload:
                return None

        answer = retrying(page, f"parts of {key}")
        if answer is None:
            return None
        found.update({part.part_number: (part.etag, part.size) for part in answer.parts})
        if not answer.is_truncated:
            return found
        marker = answer.next_marker


def complete_upload(bucket: oss2.Bucket, key: str, upload_id: str, parts: List[Tuple[int, str]]) -> None:
    """Put ``(number, ETag)`` pairs together. An upload that is gone is no error here: its answer may have been lost.

    Raises:
        PartsError: the parts do not fit together; they are of no use.
        StoreError: it cannot be done.
    """
    import oss2

    def complete() -> None:
        try:
            bucket.complete_multipart_upload(key, upload_id, [oss2.models.PartInfo(*part) for part in parts])
        except oss2.exceptions.NoSuchUpload:
            return
        except oss2.exceptions.ServerError as error:
            if error.code in ("InvalidPart", "InvalidPartOrder", "EntityTooSmall"):
                raise PartsError(f"{key}: {describe(error)}") from None
            raise

    retrying(complete, f"POST {key}")


class PartsError(StoreError):
    """The server cannot make an object of these parts."""


def copy_inside(bucket: oss2.Bucket, source: Stored, key: str) -> None:
    """Have the server copy an object, if it still is the one that ``source`` speaks of.

    Raises:
        StoreError: it is gone, is another one by now, or may not be copied.
    """
    name = bucket.bucket_name
    if source.size <= COPY_PART:
        guard = {"x-oss-copy-source-if-match": source.etag} if source.etag else {}
        retrying(functools.partial(bucket.copy_object, name, source.key, key, headers=guard), f"copy to {key}")
        return
    upload_id = retrying(lambda: bucket.init_multipart_upload(key).upload_id, f"POST {key}")
    try:
        parts = []
        for number, offset in enumerate(range(0, source.size, COPY_PART), 1):
            span = (offset, min(offset + COPY_PART, source.size) - 1)
            copy = functools.partial(bucket.upload_part_copy, name, source.key, span, key, upload_id, number)
            parts.append((number, retrying(copy, f"copy to {key}").etag))
        complete_upload(bucket, key, upload_id, parts)
    except StoreError:
        abort_upload(bucket, key, upload_id)
        raise


def abort_upload(bucket: oss2.Bucket, key: str, upload_id: str) -> bool:
    """Drop an unfinished upload and its parts; ``False`` when it was gone or the server refuses."""
    import oss2

    try:
        retrying(lambda: bucket.abort_multipart_upload(key, upload_id), f"DELETE upload of {key}")
    except (StoreError, oss2.exceptions.OssError):
        return False
    return True
