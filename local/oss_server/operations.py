"""Which operation a request is: method, bucket or object, and the subresource in the query."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from local.oss_server import bucket_ops, listing_ops, multipart_ops, object_ops
from local.oss_server.context import Context, Reply
from local.oss_server.errors import OssError
from local.oss_server.request import OssRequest
from local.oss_server.signing import V1_SUBRESOURCES


class Body(Enum):
    """What is done with a request's body before the operation runs."""

    READ = "read"  # small: kept in memory
    STORE = "store"  # any size: written to disk as it comes


@dataclass(frozen=True)
class Operation:
    """One of OSS's operations.

    Attributes:
        name: as in faults and statistics, such as ``upload_part``.
        run: does it; called in a thread.
        body: how its body is received.
    """

    name: str
    run: Callable[[Context], Reply]
    body: Body = Body.READ


def _named(run: Callable[[Context], Reply], body: Body = Body.READ) -> Operation:
    return Operation(run.__name__, run, body)


# (method, subresource) -> operation; the empty subresource is the request without any.
_BUCKET: Mapping[tuple[str, str], Operation] = {
    ("GET", "bucketInfo"): _named(bucket_ops.get_bucket_info),
    ("GET", "location"): _named(bucket_ops.get_bucket_location),
    ("GET", "acl"): _named(bucket_ops.get_bucket_acl),
    ("GET", "stat"): _named(bucket_ops.get_bucket_stat),
    ("GET", "uploads"): _named(listing_ops.list_multipart_uploads),
    ("GET", "list-type"): _named(listing_ops.list_objects_v2),
    ("GET", ""): _named(listing_ops.list_objects),
    ("POST", "delete"): _named(bucket_ops.delete_multiple_objects),
    ("PUT", ""): _named(bucket_ops.put_bucket),
    ("DELETE", ""): _named(bucket_ops.delete_bucket),
}
_OBJECT: Mapping[tuple[str, str], Operation] = {
    ("GET", "uploadId"): _named(multipart_ops.list_parts),
    ("GET", "tagging"): _named(object_ops.get_object_tagging),
    ("GET", ""): _named(object_ops.get_object),
    ("HEAD", "objectMeta"): _named(object_ops.get_object_meta),
    ("HEAD", ""): _named(object_ops.head_object),
    ("PUT", "uploadId"): _named(multipart_ops.upload_part, Body.STORE),
    ("PUT", "tagging"): _named(object_ops.put_object_tagging),
    ("PUT", ""): _named(object_ops.put_object, Body.STORE),
    ("POST", "uploads"): _named(multipart_ops.initiate_multipart_upload),
    ("POST", "uploadId"): _named(multipart_ops.complete_multipart_upload),
    ("POST", "append"): _named(object_ops.append_object, Body.STORE),
    ("DELETE", "uploadId"): _named(multipart_ops.abort_multipart_upload),
    ("DELETE", "tagging"): _named(object_ops.delete_object_tagging),
    ("DELETE", ""): _named(object_ops.delete_object),
}
_COPIES: Mapping[str, Operation] = {
    "put_object": _named(object_ops.copy_object),
    "upload_part": _named(multipart_ops.upload_part_copy),
}
_LIST_BUCKETS = _named(bucket_ops.list_buckets)

_SUBRESOURCES = {name for _, name in (*_BUCKET, *_OBJECT) if name}
# Signed parameters that only refine an operation.
_REFINEMENTS = {"partNumber", "position", "security-token", "continuation-token", "x-oss-traffic-limit", "sequential"}
_REFINEMENTS |= {name for name in V1_SUBRESOURCES if name.startswith("response-")} | {"x-oss-request-payer"}


def resolve(request: OssRequest) -> Operation:
    """Return the operation that a request asks for.

    Raises:
        OssError: ``NotImplemented`` for a subresource this server lacks, ``MethodNotAllowed`` otherwise.
    """
    if not request.bucket:
        if request.method == "GET":
            return _LIST_BUCKETS
        raise _not_allowed(request, "SERVICE")
    unknown = (V1_SUBRESOURCES & request.params.keys()) - _SUBRESOURCES - _REFINEMENTS
    if unknown:
        raise OssError("NotImplemented", f"This server does not implement {', '.join(sorted(unknown))}.")
    table, kind = (_OBJECT, "OBJECT") if request.key else (_BUCKET, "BUCKET")
    subresources = [name for name in request.params if name in _SUBRESOURCES and (request.method, name) in table]
    operation = table.get((request.method, subresources[0] if subresources else ""))
    if operation is None or (not subresources and _SUBRESOURCES & request.params.keys()):
        raise _not_allowed(request, kind)
    if "x-oss-copy-source" in request.headers:
        return _COPIES.get(operation.name, operation)
    return operation


def _not_allowed(request: OssRequest, kind: str) -> OssError:
    return OssError("MethodNotAllowed", Method=request.method, ResourceType=kind)
