"""Clients not written here, each in its own process: their signers and parsers agree with the server."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oss2
import pytest

from local.oss_server import RunningServer
from tests.oss_server.client_envs import InstallError, node_environment, python_environment
from tests.oss_server.harness import ADMIN_TOKEN, KEY_ID, REGION, SECRET

_CLIENTS = Path(__file__).parent / "clients"


def _made(make: Callable[[], Path]) -> Path:
    try:
        return make()
    except InstallError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"no environment for the foreign clients: {error}")
        pytest.skip(f"no environment for the foreign clients: {error}")


@pytest.fixture(scope="session")
def client_python() -> Path:
    return _made(python_environment)


@pytest.fixture(scope="session")
def client_node() -> Path:
    return _made(node_environment)


def _results(argv: list[str], server: RunningServer, bucket: oss2.Bucket, **more: str) -> Any:
    env = os.environ | {
        "OSS_ENDPOINT": server.endpoint,
        "OSS_BUCKET": bucket.bucket_name,
        "OSS_REGION": REGION,
        "OSS_KEY_ID": KEY_ID,
        "OSS_SECRET": SECRET,
        "OSS_ADMIN_TOKEN": ADMIN_TOKEN,
        **more,
    }
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_alibabacloud_oss_v2(server: RunningServer, v4_bucket: oss2.Bucket, client_python: Path) -> None:
    expected = {
        "objects": {
            "etag": True,
            "body": "0123456789",
            "range": "789",
            "metadata": {"step": "3"},
            "size": 10,
            "copied": True,
            "append": 3,
            "exists": [True, False],
            "tags": "1",
            "forbidden": "FileAlreadyExists",
            "absent": "NoSuchKey",
            "presigned": "0123456789",
            "listed": ["v2/a b+中.bin"],
        },
        "multipart": {"same": True, "copied": True, "left": 0, "type": "Multipart"},
        "buckets": {"name": True, "location": "oss-cn-hangzhou", "listed": True, "exists": True},
        "stranger": "SignatureDoesNotMatch",
    }
    results = _results([str(client_python), str(_CLIENTS / "oss_v2.py")], server, v4_bucket)
    assert results == {"v4": expected, "v1": expected}


def test_opendal(server: RunningServer, v4_bucket: oss2.Bucket, client_python: Path) -> None:
    assert _results([str(client_python), str(_CLIENTS / "opendal_oss.py")], server, v4_bucket) == {
        "body": "0123456789",
        "by_path": "0123456789",
        "range": "234",
        "size": 10,
        "content_type": "text/x-dal",
        "metadata": {"step": "3"},
        "absent": "NotFound",
        "stranger": True,
        "big": True,
        "copy": True,
        "listed": ["big", "copy", "dir/a b+中.bin", *(f"many/{number}" for number in range(5))],
        "level": ["big", "copy", "dir/", "many/"],
        "retried": "after 503",
        "left": [],
    }


def test_ali_oss(server: RunningServer, v4_bucket: oss2.Bucket, client_node: Path) -> None:
    argv = ["node", str(_CLIENTS / "ali_oss.mjs")]
    keys = ["js/a b+中.bin", "js/big", "js/copy", "js/log"]
    expected = {
        "body": "0123456789",
        "contentType": "text/x-js",
        "meta": {"step": "3"},
        "range": "234",
        "big": True,
        "copy": "0123456789",
        "append": "5",
        "tag": {"stage": "best"},
        "presigned": "0123456789",
        "forbidden": "FileAlreadyExists",
        "absent": "NoSuchKey",
        "stranger": "SignatureDoesNotMatch",
        "listed": keys,
        "listedV2": keys,
        "info": True,
        "buckets": True,
        "left": 0,
    }
    results = _results(argv, server, v4_bucket, OSS_NODE_ENV=str(client_node))
    assert results == {"v1": expected, "v4": expected}
