"""Operations on multipart uploads."""

from local.oss_server import metadata, xml
from local.oss_server.blobs import Written
from local.oss_server.context import Context, Reply, xml_reply
from local.oss_server.errors import OssError, invalid_argument
from local.oss_server.multipart import Completion, new_upload_id
from local.oss_server.object_ops import copy_source, etag_of
from local.oss_server.params import number
from local.oss_server.ranges import content_range, parse_range
from local.oss_server.records import PartRecord, UploadRecord

MAX_PARTS = 10000


def initiate_multipart_upload(context: Context) -> Reply:
    """Begin an upload; the object's metadata are those given here."""
    request = context.request
    if metadata.forbids_overwrite(request) and context.storage.find(context.bucket, context.key):
        raise OssError("FileAlreadyExists", Key=context.key)
    upload = UploadRecord(
        upload_id=new_upload_id(),
        key=context.key,
        initiated=context.now,
        headers=metadata.stored_headers(request),
        storage_class=metadata.storage_class(request),
        tags=metadata.tags_of_header(request),
    )
    context.uploads.create(context.bucket, upload)
    written = xml.encoder(request.param("encoding-type"))
    document = xml.render(
        "InitiateMultipartUploadResult",
        [
            *written.declared(),
            ("Bucket", context.bucket),
            ("Key", written(context.key)),
            ("UploadId", upload.upload_id),
        ],
    )
    return xml_reply(document)


def upload_part(context: Context) -> Reply:
    """Keep the received body as a part; one of the same number is replaced."""
    part = _keep_part(context, context.received())
    return Reply(200, _part_headers(part))


def upload_part_copy(context: Context) -> Reply:
    """Keep bytes of another object as a part."""
    request, storage = context.request, context.storage
    context.uploads.get(context.bucket, context.key, request.param("uploadId"))
    source, release = storage.open(*copy_source(context))
    writer = storage.blobs.create()
    try:
        metadata.check_conditions(request, source, "x-oss-copy-source-")
        asked = parse_range(request.header("x-oss-copy-source-range"), source.size, standard=True)
        first, length = asked or (0, source.size)
        for chunk in storage.blobs.read(source.segments, first, length):
            writer.write(chunk)
        part = _keep_part(context, writer.finish())
    except BaseException:
        writer.discard()
        raise
    finally:
        release()
    headers = {"Content-Range": content_range(first, length, source.size)} if asked else {}
    document = xml.render("CopyPartResult", [("LastModified", xml.iso8601(part.modified)), ("ETag", f'"{part.etag}"')])
    return xml_reply(document, {**headers, **_part_headers(part)})


def _part_headers(part: PartRecord) -> dict[str, str]:
    return {"ETag": f'"{part.etag}"', "x-oss-hash-crc64ecma": str(part.crc64)}


def _keep_part(context: Context, written: Written) -> PartRecord:
    part_number = context.request.param("partNumber")
    if not part_number.isdecimal() or not 1 <= int(part_number) <= MAX_PARTS:
        message = "Part number must be an integer between 1 and 10000, inclusive."
        raise invalid_argument(message, "partNumber", part_number)
    part = PartRecord(
        number=int(part_number),
        etag=etag_of(written),
        crc64=written.crc64,
        modified=context.now,
        segments=(written.segment,),
    )
    context.uploads.put_part(context.bucket, context.key, context.request.param("uploadId"), part)
    context.kept = True
    return part


def complete_multipart_upload(context: Context) -> Reply:
    """Put the named parts together, or all of them with ``x-oss-complete-all: yes``."""
    request = context.request
    upload_id = request.param("uploadId")
    context.uploads.get(context.bucket, context.key, upload_id)
    take_all = request.header("x-oss-complete-all").lower() == "yes"
    wanted = Completion(
        parts=None if take_all else _named_parts(context.content),
        forbid_overwrite=metadata.forbids_overwrite(request),
        min_part_size=context.settings.min_part_size,
        now=context.now,
    )
    record = context.uploads.complete(context.bucket, context.key, upload_id, wanted)
    written = xml.encoder(request.param("encoding-type"))
    document = xml.render(
        "CompleteMultipartUploadResult",
        [
            *written.declared(),
            ("Location", f"http://{request.host}/{context.bucket}/{written(context.key)}"),
            ("Bucket", context.bucket),
            ("Key", written(context.key)),
            ("ETag", f'"{record.etag}"'),
        ],
    )
    return xml_reply(document, metadata.identity_headers(record))


def _named_parts(body: bytes) -> list[tuple[int, str]]:
    named = []
    for part in xml.parse(body, "CompleteMultipartUpload").findall("Part"):
        part_number = xml.text(part, "PartNumber").strip()
        if not part_number.isdecimal():
            raise OssError("MalformedXML")
        named.append((int(part_number), xml.text(part, "ETag")))
    return named


def abort_multipart_upload(context: Context) -> Reply:
    """Forget an upload and its parts."""
    context.uploads.abort(context.bucket, context.key, context.request.param("uploadId"))
    return Reply(204)


def list_parts(context: Context) -> Reply:
    """Return the parts that arrived, by number, in pages."""
    request = context.request
    upload_id = request.param("uploadId")
    limit = number(request, "max-parts", default=1000, most=1000)
    marker = number(request, "part-number-marker", default=0, most=MAX_PARTS)
    written = xml.encoder(request.param("encoding-type"))
    rest = [part for part in context.uploads.parts(context.bucket, context.key, upload_id) if part.number > marker]
    page = rest[:limit]
    parts: list[xml.Element] = [("Part", _part_elements(part)) for part in page]
    document = xml.render(
        "ListPartsResult",
        [
            *written.declared(),
            ("Bucket", context.bucket),
            ("Key", written(context.key)),
            ("UploadId", upload_id),
            ("StorageClass", context.uploads.get(context.bucket, context.key, upload_id).storage_class),
            ("PartNumberMarker", str(marker)),
            ("NextPartNumberMarker", str(page[-1].number if page else marker)),
            ("MaxParts", str(limit)),
            ("IsTruncated", "true" if len(rest) > limit else "false"),
            *parts,
        ],
    )
    return xml_reply(document)


def _part_elements(part: PartRecord) -> list[xml.Element]:
    return [
        ("PartNumber", str(part.number)),
        ("LastModified", xml.iso8601(part.modified)),
        ("ETag", f'"{part.etag}"'),
        ("HashCrc64ecma", str(part.crc64)),
        ("Size", str(part.size)),
    ]
