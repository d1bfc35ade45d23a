"""Operations on one object: put, append, copy, get, head, delete, tags."""

from base64 import b64encode
from dataclasses import replace
from urllib.parse import unquote_to_bytes

from local.oss_server import crc64, metadata, xml
from local.oss_server.blobs import Written
from local.oss_server.context import Context, Reply, Stream, xml_reply
from local.oss_server.errors import OssError, invalid_argument
from local.oss_server.ranges import content_range, parse_range
from local.oss_server.records import ObjectRecord
from local.oss_server.request import decode_key


def etag_of(written: Written) -> str:
    """Return the ETag of bytes received in one piece: their MD5, upper-case hex."""
    return written.md5.hex().upper()


def put_object(context: Context) -> Reply:
    """Store the received body as the object."""
    request = context.request
    headers = metadata.stored_headers(request)
    storage_class, tags = metadata.storage_class(request), metadata.tags_of_header(request)
    written = context.received()
    record = ObjectRecord(
        etag=etag_of(written),
        crc64=written.crc64,
        modified=context.now,
        segments=(written.segment,),
        headers=headers,
        storage_class=storage_class,
        tags=tags,
    )
    context.storage.put(context.bucket, context.key, record, forbid_overwrite=metadata.forbids_overwrite(request))
    context.kept = True
    return Reply(200, {**metadata.identity_headers(record), "Content-MD5": b64encode(written.md5).decode()})


def append_object(context: Context) -> Reply:
    """Add the received body to the end of an appendable object, which begins at position 0."""
    position = context.request.param("position")
    if not position.isdecimal():
        raise invalid_argument("The append position must be a number.", "position", position)
    storage = context.storage
    with storage.database.transaction():
        old = storage.find(context.bucket, context.key)
        if old and old.kind != "Appendable":
            raise OssError("ObjectNotAppendable")
        size = old.size if old else 0
        if int(position) != size:
            raise OssError("PositionNotEqualToLength", headers={"x-oss-next-append-position": str(size)})
        written = context.received()
        base = old or ObjectRecord(
            etag="",
            crc64=0,
            modified=context.now,
            segments=(),
            headers=metadata.stored_headers(context.request),
            kind="Appendable",
            storage_class=metadata.storage_class(context.request),
            tags=metadata.tags_of_header(context.request),
        )
        record = replace(
            base,
            etag=etag_of(written),
            crc64=crc64.combine(base.crc64, written.crc64, written.segment.size),
            modified=context.now,
            segments=(*base.segments, written.segment),
        )
        storage.put(context.bucket, context.key, record)
    context.kept = True
    return Reply(200, {**metadata.identity_headers(record), "x-oss-next-append-position": str(record.size)})


def copy_source(context: Context) -> tuple[str, str]:
    """Return bucket and key of ``x-oss-copy-source``.

    Raises:
        OssError: ``InvalidArgument`` when it is not ``/bucket/key``.
    """
    header = context.request.header("x-oss-copy-source")
    source = unquote_to_bytes(header.partition("?")[0]).lstrip(b"/")
    bucket, _, key = source.partition(b"/")
    if not bucket or not key:
        raise invalid_argument("Copy Source must mention the source bucket and key.", "x-oss-copy-source", header)
    return bucket.decode("utf-8", "replace"), decode_key(key)


def copy_object(context: Context) -> Reply:
    """Make the object a copy of another, with the source's metadata or the request's own."""
    request, storage = context.request, context.storage
    source, release = storage.open(*copy_source(context))
    try:
        metadata.check_conditions(request, source, "x-oss-copy-source-")
        record = replace(
            source,
            modified=context.now,
            segments=storage.blobs.link(source.segments),
            kind="Normal",
            storage_class=metadata.storage_class(request),
        )
    finally:
        release()
    directive = (request.header("x-oss-metadata-directive") or "COPY").upper()
    if directive == "REPLACE":
        record = replace(record, headers=metadata.stored_headers(request))
    if request.header("x-oss-tagging-directive").lower() == "replace":
        record = replace(record, tags=metadata.tags_of_header(request))
    try:
        storage.put(context.bucket, context.key, record, forbid_overwrite=metadata.forbids_overwrite(request))
    except OssError:
        storage.blobs.drop(record.segments)
        raise
    document = xml.render(
        "CopyObjectResult", [("LastModified", xml.iso8601(record.modified)), ("ETag", f'"{record.etag}"')]
    )
    return xml_reply(document, metadata.identity_headers(record))


def get_object(context: Context) -> Reply:
    """Return an object's bytes, all or a range."""
    request = context.request
    record, release = context.storage.open(context.bucket, context.key)
    try:
        metadata.check_conditions(request, record)
        standard = request.header("x-oss-range-behavior").lower() == "standard"
        part = parse_range(request.header("range"), record.size, standard=standard)
    except OssError:
        release()
        raise
    headers = metadata.reply_headers(record, request.params)
    first, length = part or (0, record.size)
    if part:
        headers["Content-Range"] = content_range(first, length, record.size)
    chunks = context.storage.blobs.read(record.segments, first, length)
    return Reply(206 if part else 200, headers, Stream(length, chunks, release))


def head_object(context: Context) -> Reply:
    """Return an object's headers."""
    record = context.storage.get(context.bucket, context.key)
    metadata.check_conditions(context.request, record)
    return Reply(200, {**metadata.reply_headers(record, {}), "Content-Length": str(record.size)})


def get_object_meta(context: Context) -> Reply:
    """Return the few headers of ``?objectMeta``."""
    record = context.storage.get(context.bucket, context.key)
    headers = {
        **metadata.identity_headers(record),
        "Last-Modified": metadata.http_date(record.modified),
        "Content-Length": str(record.size),
    }
    return Reply(200, headers)


def delete_object(context: Context) -> Reply:
    """Remove an object; an absent one is no error."""
    context.storage.delete(context.bucket, context.key)
    return Reply(204)


def put_object_tagging(context: Context) -> Reply:
    """Replace an object's tags by those of the body."""
    tree = xml.parse(context.content, "Tagging")
    tags = {xml.text(tag, "Key"): xml.text(tag, "Value") for tag in tree.findall("TagSet/Tag")}
    return _retag(context, metadata.checked_tags(tags), 200)


def delete_object_tagging(context: Context) -> Reply:
    """Remove an object's tags."""
    return _retag(context, {}, 204)


def _retag(context: Context, tags: dict[str, str], status: int) -> Reply:
    with context.storage.database.transaction():
        record = context.storage.get(context.bucket, context.key)
        context.storage.put(context.bucket, context.key, replace(record, tags=tags))
    return Reply(status)


def get_object_tagging(context: Context) -> Reply:
    """Return an object's tags."""
    record = context.storage.get(context.bucket, context.key)
    tags: list[xml.Element] = [("Tag", [("Key", key), ("Value", value)]) for key, value in record.tags.items()]
    return xml_reply(xml.render("Tagging", [("TagSet", tags)]))
