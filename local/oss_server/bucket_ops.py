"""Operations on the service and on buckets."""

from local.oss_server import xml
from local.oss_server.context import Context, Reply, xml_reply
from local.oss_server.errors import OssError
from local.oss_server.metadata import storage_class
from local.oss_server.params import number
from local.oss_server.records import BucketRecord
from local.oss_server.request import decode_key

MAX_DELETED = 1000


def list_buckets(context: Context) -> Reply:
    """List the buckets, in pages by ``marker``."""
    request = context.request
    prefix, marker = request.param("prefix"), request.param("marker")
    limit = number(request, "max-keys", default=100, least=1, most=1000)
    named = [bucket for bucket in context.storage.buckets() if bucket.name.startswith(prefix) and bucket.name > marker]
    shown, truncated = named[:limit], len(named) > limit
    paging: list[xml.Element] = []
    if prefix or marker or truncated:
        paging = [
            ("Prefix", prefix),
            ("Marker", marker),
            ("MaxKeys", str(limit)),
            ("IsTruncated", "true" if truncated else "false"),
            ("NextMarker", shown[-1].name if truncated else ""),
        ]
    buckets: list[xml.Element] = [("Bucket", _bucket_elements(context, bucket)) for bucket in shown]
    return xml_reply(xml.render("ListAllMyBucketsResult", [xml.OWNER, *paging, ("Buckets", buckets)]))


def _bucket_elements(context: Context, bucket: BucketRecord) -> list[xml.Element]:
    region = context.settings.region
    return [
        ("Name", bucket.name),
        ("Location", f"oss-{region}"),
        ("Region", region),
        ("CreationDate", xml.iso8601(bucket.created)),
        ("ExtranetEndpoint", context.request.host),
        ("IntranetEndpoint", context.request.host),
        ("StorageClass", bucket.storage_class),
    ]


def put_bucket(context: Context) -> Reply:
    """Make a bucket. Only private ones are to be had."""
    if context.request.header("x-oss-acl") not in ("", "private"):
        raise OssError("NotImplemented", "Only private buckets are supported.")
    wanted = storage_class(context.request)
    if context.content:
        wanted = xml.text(xml.parse(context.content, "CreateBucketConfiguration"), "StorageClass", wanted)
    context.storage.create_bucket(BucketRecord(context.bucket, context.now, wanted))
    return Reply(200, {"Location": f"/{context.bucket}"})


def delete_bucket(context: Context) -> Reply:
    """Remove an empty bucket."""
    context.storage.delete_bucket(context.bucket)
    return Reply(204)


def get_bucket_info(context: Context) -> Reply:
    """Describe a bucket."""
    bucket = context.storage.bucket(context.bucket)
    more: list[xml.Element] = [
        xml.OWNER,
        ("AccessControlList", [("Grant", "private")]),
        ("DataRedundancyType", "LRS"),
        ("Comment", ""),
    ]
    return xml_reply(xml.render("BucketInfo", [("Bucket", [*_bucket_elements(context, bucket), *more])]))


def get_bucket_location(context: Context) -> Reply:
    """Return where a bucket is."""
    context.storage.bucket(context.bucket)
    return xml_reply(xml.render("LocationConstraint", f"oss-{context.settings.region}"))


def get_bucket_acl(context: Context) -> Reply:
    """Return a bucket's access control: always private."""
    context.storage.bucket(context.bucket)
    return xml_reply(xml.render("AccessControlPolicy", [xml.OWNER, ("AccessControlList", [("Grant", "private")])]))


def get_bucket_stat(context: Context) -> Reply:
    """Return how much a bucket holds."""
    context.storage.bucket(context.bucket)
    sizes = [record.size for _, record in context.storage.walk(context.bucket, b"")]
    uploads = sum(len(records) for _, records in context.uploads.walk(context.bucket, b""))
    body: list[xml.Element] = [
        ("Storage", str(sum(sizes))),
        ("ObjectCount", str(len(sizes))),
        ("MultipartUploadCount", str(uploads)),
    ]
    return xml_reply(xml.render("BucketStat", body))


def delete_multiple_objects(context: Context) -> Reply:
    """Remove up to 1000 objects; absent ones are no error. Quiet mode names none of them."""
    context.storage.bucket(context.bucket)
    tree = xml.parse(context.content, "Delete")
    keys = [xml.text(node, "Key") for node in tree.findall("Object")]
    if not 1 <= len(keys) <= MAX_DELETED or not all(keys):
        raise OssError("MalformedXML")
    for key in keys:
        context.storage.delete(context.bucket, decode_key(key.encode()))
    if xml.text(tree, "Quiet", "false").strip().lower() == "true":
        return Reply(200)
    written = xml.encoder(context.request.param("encoding-type"))
    deleted: list[xml.Element] = [("Deleted", [("Key", written(key))]) for key in keys]
    return xml_reply(xml.render("DeleteResult", [*written.declared(), *deleted]))
