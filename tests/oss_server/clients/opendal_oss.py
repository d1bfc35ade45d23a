"""Calls of OpenDAL's OSS service (a signer written in Rust), against the server of the environment; prints JSON."""

import json
import os
import sys
import urllib.request

import opendal

PART = 200 * 1024
# A real-looking endpoint that resolves nowhere; HTTP_PROXY leads it to the server, with the bucket in the host name.
HOSTED = "http://oss-cn-hangzhou.example.invalid"


def make_operator(secret: str, endpoint: str = HOSTED) -> opendal.Operator:
    """Return an operator; for an IP address the bucket is in the path.

    In that style OpenDAL signs requests on the bucket itself (listing, deleting many) as /bucket instead of /bucket/,
    which OSS refuses, so those are tried in the other.
    """
    style = "virtual" if endpoint == HOSTED else "path"
    return opendal.Operator(
        "oss",
        bucket=os.environ["OSS_BUCKET"],
        endpoint=endpoint,
        access_key_id=os.environ["OSS_KEY_ID"],
        access_key_secret=secret,
        addressing_style=style,
        root="/dal/",
    )


def post_fault(**fault: object) -> None:
    headers = {"x-admin-token": os.environ["OSS_ADMIN_TOKEN"]}
    url = os.environ["OSS_ENDPOINT"] + "/_faults"
    request = urllib.request.Request(url, json.dumps(fault).encode(), headers, method="POST")
    urllib.request.urlopen(request).close()


def error_of(call, *args) -> str:
    try:
        call(*args)
    except Exception as error:  # its errors share no other root
        return f"{type(error).__name__} {error}"
    return "no error"


def main() -> None:
    os.environ["HTTP_PROXY"] = os.environ["http_proxy"] = os.environ["OSS_ENDPOINT"]
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    by_path = make_operator(os.environ["OSS_SECRET"], os.environ["OSS_ENDPOINT"])
    operator = make_operator(os.environ["OSS_SECRET"])
    name = "dir/a b+中.bin"
    data = bytes(range(256)) * (PART * 3 // 256) + b"tail"
    operator.write(name, b"0123456789", content_type="text/x-dal", user_metadata={"step": "3"})
    stat = operator.stat(name)
    results: dict[str, object] = {
        "body": operator.read(name).decode(),
        "by_path": by_path.read(name).decode(),
        "range": operator.read(name, offset=2, size=3).decode(),
        "size": stat.content_length,
        "content_type": stat.content_type,
        "metadata": stat.user_metadata,
        "absent": error_of(operator.read, "none").split()[0],
        "stranger": "SignatureDoesNotMatch" in error_of(make_operator("guessed").read, name),
    }
    by_path.write("big", data, chunk=PART, concurrent=2)  # multipart
    results["big"] = operator.read("big") == data
    operator.copy("big", "copy")
    results["copy"] = operator.read("copy") == data
    for number in range(5):
        operator.write(f"many/{number}", b"x")
    results["listed"] = sorted(entry.path for entry in operator.list("", recursive=True))
    results["level"] = sorted(entry.path for entry in operator.list("/"))

    retrying = operator.layer(opendal.layers.RetryLayer(max_times=3, min_delay=0.01, max_delay=0.05))
    post_fault(kind="status", status=503, operation="put_object")
    retrying.write("retried", b"after 503")
    post_fault(kind="reset", operation="get_object", after_bytes=0)
    results["retried"] = retrying.read("retried").decode()

    operator.remove_all("")
    results["left"] = [entry.path for entry in operator.list("", recursive=True) if not entry.path.endswith("/")]
    json.dump(results, sys.stdout)


main()
