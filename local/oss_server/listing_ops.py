"""Operations that list objects and unfinished uploads."""

import base64
import binascii

from local.oss_server import xml
from local.oss_server.context import Context, Reply, xml_reply
from local.oss_server.errors import invalid_argument
from local.oss_server.listing import Page, list_page
from local.oss_server.params import number
from local.oss_server.records import ObjectRecord, UploadRecord

MAX_KEYS = 1000
DEFAULT_KEYS = 100


def list_objects(context: Context) -> Reply:
    """List objects, first version: pages by ``marker``."""
    request = context.request
    marker = request.param("marker")
    page, head = _page(context, marker)
    written = xml.encoder(request.param("encoding-type"))
    more = xml.optional(("NextMarker", written(page.last) if page.truncated else ""))
    body = [("Marker", written(marker)), *head, *more, *_contents(page, written, owner=True)]
    return xml_reply(xml.render("ListBucketResult", body))


def list_objects_v2(context: Context) -> Reply:
    """List objects, second version: pages by an opaque ``continuation-token``."""
    request = context.request
    token, start_after = request.param("continuation-token"), request.param("start-after")
    page, head = _page(context, _read_token(token) if token else start_after)
    written = xml.encoder(request.param("encoding-type"))
    more = xml.optional(
        ("StartAfter", written(start_after)),
        ("ContinuationToken", token),
        ("NextContinuationToken", _token(page.last) if page.truncated else ""),
    )
    owner = request.param("fetch-owner").lower() == "true"
    body = [*head, ("KeyCount", str(len(page))), *more, *_contents(page, written, owner=owner)]
    return xml_reply(xml.render("ListBucketResult", body))


def _page(context: Context, after: str) -> tuple[Page[ObjectRecord], list[xml.Element]]:
    request = context.request
    context.storage.bucket(context.bucket)
    prefix, delimiter = request.param("prefix"), request.param("delimiter")
    limit = number(request, "max-keys", default=DEFAULT_KEYS, least=1, most=MAX_KEYS)
    written = xml.encoder(request.param("encoding-type"))
    page = list_page(
        lambda lower: context.storage.walk(context.bucket, lower),
        prefix=prefix,
        delimiter=delimiter,
        after=after,
        limit=limit,
    )
    head: list[xml.Element] = [
        ("Name", context.bucket),
        ("Prefix", written(prefix)),
        ("MaxKeys", str(limit)),
        ("Delimiter", written(delimiter)),
        *written.declared(),
        ("IsTruncated", "true" if page.truncated else "false"),
    ]
    return page, head


def _contents(page: Page[ObjectRecord], written: xml.Encoder, *, owner: bool) -> list[xml.Element]:
    owners = [xml.OWNER] if owner else []
    objects: list[xml.Element] = [
        (
            "Contents",
            [
                ("Key", written(key)),
                ("LastModified", xml.iso8601(record.modified)),
                ("ETag", f'"{record.etag}"'),
                ("Type", record.kind),
                ("Size", str(record.size)),
                ("StorageClass", record.storage_class),
                *owners,
            ],
        )
        for key, record in page.items
    ]
    return [*objects, *_prefixes(page.prefixes, written)]


def _prefixes(prefixes: list[str], written: xml.Encoder) -> list[xml.Element]:
    return [("CommonPrefixes", [("Prefix", written(prefix))]) for prefix in prefixes]


def _token(last: str) -> str:
    return base64.urlsafe_b64encode(last.encode()).decode()


def _read_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise invalid_argument("The continuation token provided is incorrect.", "continuation-token", token) from error


def list_multipart_uploads(context: Context) -> Reply:
    """List unfinished uploads, by key and then upload id."""
    request = context.request
    context.storage.bucket(context.bucket)
    prefix, delimiter = request.param("prefix"), request.param("delimiter")
    key_marker, id_marker = request.param("key-marker"), request.param("upload-id-marker")
    limit = number(request, "max-uploads", default=1000, least=1, most=1000)
    written = xml.encoder(request.param("encoding-type"))
    rest = _uploads_at_marker(context, key_marker, id_marker) if key_marker.startswith(prefix) else []
    # The page counts keys, of which each may have several uploads: one more than the limit always suffices.
    page = list_page(
        lambda lower: context.uploads.walk(context.bucket, lower),
        prefix=prefix,
        delimiter=delimiter,
        after=key_marker,
        limit=limit + 1,
    )
    entries = _merge(rest, page)
    shown = entries[:limit]
    last_key, last_id = shown[-1][:2] if shown else ("", "")
    body: list[xml.Element] = [
        *written.declared(),
        ("Bucket", context.bucket),
        ("KeyMarker", written(key_marker)),
        ("UploadIdMarker", id_marker),
        ("NextKeyMarker", written(last_key)),
        ("NextUploadIdMarker", last_id),
        ("Delimiter", written(delimiter)),
        ("Prefix", written(prefix)),
        ("MaxUploads", str(limit)),
        ("IsTruncated", "true" if len(entries) > limit else "false"),
        *[("Upload", _upload_elements(upload, written)) for _, _, upload in shown if upload],
        *_prefixes([key for key, _, upload in shown if not upload], written),
    ]
    return xml_reply(xml.render("ListMultipartUploadsResult", body))


# Key or common prefix, upload id, and the upload; a common prefix has no upload.
_Entry = tuple[str, str, UploadRecord | None]


def _uploads_at_marker(context: Context, key_marker: str, id_marker: str) -> list[UploadRecord]:
    """Return the uploads of the marker's own key that come after the id marker."""
    if not id_marker:
        return []
    return [upload for upload in context.uploads.at(context.bucket, key_marker) if upload.upload_id > id_marker]


def _merge(first: list[UploadRecord], page: Page[list[UploadRecord]]) -> list[_Entry]:
    entries: list[_Entry] = [(upload.key, upload.upload_id, upload) for _, uploads in page.items for upload in uploads]
    entries += [(prefix, "", None) for prefix in page.prefixes]
    entries.sort(key=lambda entry: (entry[0].encode(), entry[1]))
    return [*[(upload.key, upload.upload_id, upload) for upload in first], *entries]


def _upload_elements(upload: UploadRecord, written: xml.Encoder) -> list[xml.Element]:
    return [
        ("Key", written(upload.key)),
        ("UploadId", upload.upload_id),
        ("StorageClass", upload.storage_class),
        ("Initiated", xml.iso8601(upload.initiated)),
    ]
