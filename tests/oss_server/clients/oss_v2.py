"""Calls of alibabacloud-oss-v2, unchanged, against the server of the environment; prints results as JSON."""

import datetime
import hashlib
import json
import os
import sys
import tempfile
import urllib.request
from pathlib import Path

import alibabacloud_oss_v2 as oss

BUCKET = os.environ["OSS_BUCKET"]
PART = 100 * 1024


def make_client(secret: str, version: str) -> oss.Client:
    config = oss.config.load_default()
    config.credentials_provider = oss.credentials.StaticCredentialsProvider(os.environ["OSS_KEY_ID"], secret)
    config.region = os.environ["OSS_REGION"]
    config.endpoint = os.environ["OSS_ENDPOINT"]
    config.use_path_style = True
    config.signature_version = version
    return oss.Client(config)


def code_of(call, *args) -> str:
    try:
        call(*args)
    except oss.exceptions.OperationError as error:
        return str(error.unwrap().code)
    return "no error"


def objects(client: oss.Client) -> dict[str, object]:
    key = "v2/a b+中.bin"
    put = client.put_object(
        oss.PutObjectRequest(bucket=BUCKET, key=key, body=b"0123456789", metadata={"step": "3"}, tagging="a=1")
    )
    got = client.get_object(oss.GetObjectRequest(bucket=BUCKET, key=key))
    part = client.get_object(
        oss.GetObjectRequest(bucket=BUCKET, key=key, range_header="bytes=7-20", range_behavior="standard")
    )
    copied = client.copy_object(
        oss.CopyObjectRequest(bucket=BUCKET, key="v2/copy", source_bucket=BUCKET, source_key=key)
    )
    appended = client.append_object(oss.AppendObjectRequest(bucket=BUCKET, key="v2/log", position=0, body=b"abc"))
    head = client.head_object(oss.HeadObjectRequest(bucket=BUCKET, key=key))
    results = {
        "etag": put.etag.strip('"') == hashlib.md5(b"0123456789", usedforsecurity=False).hexdigest().upper(),
        "body": got.body.content.decode(),
        "range": part.body.content.decode(),
        "metadata": dict(head.metadata),
        "size": head.content_length,
        "copied": copied.etag == put.etag,
        "append": appended.next_position,
        "exists": [client.is_object_exist(BUCKET, key), client.is_object_exist(BUCKET, "v2/none")],
        "tags": client.get_object_tagging(oss.GetObjectTaggingRequest(bucket=BUCKET, key=key)).tag_set.tags[0].value,
        "forbidden": code_of(
            client.put_object, oss.PutObjectRequest(bucket=BUCKET, key=key, body=b"x", forbid_overwrite=True)
        ),
        "absent": code_of(client.get_object, oss.GetObjectRequest(bucket=BUCKET, key="v2/none")),
        "presigned": presigned(client, key),
    }
    doomed = [oss.DeleteObject(key="v2/copy"), oss.DeleteObject(key="v2/log")]
    client.delete_multiple_objects(oss.DeleteMultipleObjectsRequest(bucket=BUCKET, objects=doomed))
    pages = client.list_objects_v2_paginator().iter_page(
        oss.ListObjectsV2Request(bucket=BUCKET, prefix="v2/", max_keys=1)
    )
    results["listed"] = [entry.key for page in pages for entry in page.contents or []]
    return results


def presigned(client: oss.Client, key: str) -> str:
    url = client.presign(oss.GetObjectRequest(bucket=BUCKET, key=key), expires=datetime.timedelta(seconds=60)).url
    with urllib.request.urlopen(url) as reply:
        return reply.read().decode()


def multipart(client: oss.Client, folder: Path) -> dict[str, object]:
    data = bytes(range(256)) * (PART * 4 // 256) + b"tail"
    source = folder / "model"
    source.write_bytes(data)
    uploader = client.uploader(part_size=PART, parallel_num=3)
    uploader.upload_file(oss.PutObjectRequest(bucket=BUCKET, key="v2/big"), str(source))
    target = folder / "back"
    downloader = client.downloader(part_size=PART, parallel_num=3)
    downloader.download_file(oss.GetObjectRequest(bucket=BUCKET, key="v2/big"), str(target))
    copier = client.copier(part_size=PART, multipart_copy_threshold=PART, disable_shallow_copy=True)
    copier.copy(oss.CopyObjectRequest(bucket=BUCKET, key="v2/big2", source_bucket=BUCKET, source_key="v2/big"))
    again = client.get_object(oss.GetObjectRequest(bucket=BUCKET, key="v2/big2"))
    uploads = client.list_multipart_uploads(oss.ListMultipartUploadsRequest(bucket=BUCKET))
    return {
        "same": target.read_bytes() == data,
        "copied": again.body.content == data,
        "left": len(uploads.uploads or []),
        "type": client.head_object(oss.HeadObjectRequest(bucket=BUCKET, key="v2/big")).object_type,
    }


def buckets(client: oss.Client) -> dict[str, object]:
    info = client.get_bucket_info(oss.GetBucketInfoRequest(bucket=BUCKET)).bucket_info
    listed = [
        bucket.name
        for page in client.list_buckets_paginator().iter_page(oss.ListBucketsRequest())
        for bucket in page.buckets
    ]
    return {
        "name": info.name == BUCKET,
        "location": client.get_bucket_location(oss.GetBucketLocationRequest(bucket=BUCKET)).location,
        "listed": BUCKET in listed,
        "exists": client.is_bucket_exist(BUCKET),
    }


def main() -> None:
    results = {}
    for version in ("v4", "v1"):
        client = make_client(os.environ["OSS_SECRET"], version)
        with tempfile.TemporaryDirectory() as folder:
            results[version] = {
                "objects": objects(client),
                "multipart": multipart(client, Path(folder)),
                "buckets": buckets(client),
                "stranger": code_of(
                    make_client("guessed", version).get_object, oss.GetObjectRequest(bucket=BUCKET, key="k")
                ),
            }
        for key in ("v2/a b+中.bin", "v2/big", "v2/big2"):
            client.delete_object(oss.DeleteObjectRequest(bucket=BUCKET, key=key))
    json.dump(results, sys.stdout)


main()
