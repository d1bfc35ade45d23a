"""How new objects are stored: encryption, storage class and tags, on every way by which ``oss2`` makes one."""

from __future__ import annotations

from typing import Any, Dict
from urllib.parse import urlencode

from trainer.protocol import ObjectOptions


def headers_of(options: ObjectOptions) -> Dict[str, str]:
    """The request headers that ask for ``options``; empty where the bucket's own defaults hold."""
    headers = {
        "x-oss-server-side-encryption": options.encryption,
        "x-oss-server-side-encryption-key-id": options.kms_key_id,
        "x-oss-storage-class": options.storage_class,
        "x-oss-tagging": urlencode(sorted(options.tags.items())),
        "x-oss-forbid-overwrite": "true" if options.forbid_overwrite else "",
    }
    return {name: value for name, value in headers.items() if value}


def bucket_with(options: ObjectOptions) -> Any:
    """A kind of ``oss2.Bucket`` that adds the headers wherever an object begins: one put, or a multipart upload."""
    import oss2

    added = headers_of(options)
    if not added:
        return oss2.Bucket

    class BucketWithOptions(oss2.Bucket):  # type: ignore[misc]  # oss2 has no types
        """Adds the headers; all else is oss2's."""

        def put_object(self, key: str, data: Any, headers: Any = None, progress_callback: Any = None) -> Any:
            """As oss2's."""
            return super().put_object(key, data, {**added, **(headers or {})}, progress_callback)

        def init_multipart_upload(self, key: str, headers: Any = None, params: Any = None) -> Any:
            """As oss2's."""
            return super().init_multipart_upload(key, {**added, **(headers or {})}, params)

        def copy_object(
            self, source_bucket_name: str, source_key: str, target_key: str, headers: Any = None, params: Any = None
        ) -> Any:
            """As oss2's; tags are the copy's own, not the source's."""
            tagging = {"x-oss-tagging-directive": "Replace"} if options.tags else {}
            mine = {**added, **tagging, **(headers or {})}
            return super().copy_object(source_bucket_name, source_key, target_key, mine, params)

    return BucketWithOptions
