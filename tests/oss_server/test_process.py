"""The server as a process of its own: the command, restarts, kills, and how much memory it takes."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import oss2
import psutil
import pytest

from local.oss_server import running_server
from tests.oss_server.harness import ADMIN_TOKEN, KEY_ID, PART, REGION, SECRET, auth, connect, pattern, wait_until

_ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def command(root: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], oss2.Bucket]]:
    """Run the command on a free port; yield the process and a bucket."""
    argv = [sys.executable, "-m", "local.oss_server", "--root", str(root), "--port", "0", "--access-key-id", KEY_ID]
    secrets = {"OSS_SERVER_ACCESS_KEY_SECRET": SECRET, "OSS_SERVER_ADMIN_TOKEN": ADMIN_TOKEN}
    process = subprocess.Popen(
        [*argv, "--bucket", "models", *more], cwd=_ROOT, env=os.environ | secrets, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        yield process, oss2.Bucket(auth("v4"), endpoint, "models", region=REGION)
    finally:
        process.terminate()
        try:
            process.wait(10)
        finally:
            process.kill()
            if process.stdout:
                process.stdout.close()


def test_the_command_prints_its_endpoint_and_stops_on_request(tmp_path: Path) -> None:
    with command(tmp_path) as (process, bucket):
        assert bucket.endpoint.startswith("http://127.0.0.1:")
        bucket.put_object("k", b"v")
        assert httpx.get(f"{bucket.endpoint}/_stats", headers={"x-admin-token": ADMIN_TOKEN}).status_code == 200
    assert process.returncode is not None


def test_the_command_wants_its_secret_in_the_environment(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OSS_SERVER_ACCESS_KEY_SECRET"}
    argv = [sys.executable, "-m", "local.oss_server", "--root", str(tmp_path), "--port", "0", "--access-key-id", "x"]
    done = subprocess.run(argv, cwd=_ROOT, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "OSS_SERVER_ACCESS_KEY_SECRET" in done.stderr


def test_a_killed_server_comes_back_with_everything(tmp_path: Path) -> None:
    with command(tmp_path) as (process, bucket):
        bucket.put_object("a b/中", pattern(300_000), headers={"x-oss-meta-step": "5", "x-oss-tagging": "a=1"})
        bucket.append_object("log", 0, b"one,")
        upload = bucket.init_multipart_upload("big").upload_id
        first = bucket.upload_part("big", upload, 1, pattern(PART, 1))
        process.kill()
        process.wait(10)
    blobs = tmp_path / "blobs"
    (blobs / "half-written").write_bytes(b"junk")
    with running_server(tmp_path, {KEY_ID: SECRET}, region=REGION) as again:
        bucket = connect(again, "models")
        assert not (blobs / "half-written").exists()
        got = bucket.get_object("a b/中")
        assert got.read() == pattern(300_000)
        assert got.headers["x-oss-meta-step"] == "5"
        assert bucket.get_object_tagging("a b/中").tag_set.tagging_rule == {"a": "1"}
        bucket.append_object("log", 4, b"two")
        assert bucket.get_object("log").read() == b"one,two"
        assert [part.etag for part in bucket.list_parts("big", upload).parts] == [first.etag]
        last = bucket.upload_part("big", upload, 2, b"end")
        parts = [
            oss2.models.PartInfo(1, first.etag, size=PART, part_crc=first.crc),
            oss2.models.PartInfo(2, last.etag, size=3, part_crc=last.crc),
        ]
        bucket.complete_multipart_upload("big", upload, parts)
        assert bucket.get_object("big").read() == pattern(PART, 1) + b"end"
        assert len(list(blobs.iterdir())) == 5


def test_nothing_is_left_on_disk_of_what_was_removed(tmp_path: Path) -> None:
    with running_server(tmp_path, {KEY_ID: SECRET}, buckets=["models"], region=REGION) as server:
        bucket = connect(server, "models")
        for _ in range(2):
            bucket.put_object("k", pattern(PART))
        bucket.copy_object("models", "k", "k2")
        bucket.append_object("log", 0, b"x")
        upload = bucket.init_multipart_upload("k").upload_id
        for number in (1, 1, 2):
            bucket.upload_part("k", upload, number, pattern(PART))
        assert len(list((tmp_path / "blobs").iterdir())) == 5
        with pytest.raises(oss2.exceptions.ServerError):
            bucket.put_object("k", b"x", headers={"Content-MD5": "AAAA"})
        server.inject(kind="reset", after_bytes=1 << 20)
        with pytest.raises(oss2.exceptions.RequestError):
            bucket.put_object("k", pattern(4 << 20))
        listed = bucket.list_parts("k", upload).parts
        bucket.complete_multipart_upload("k", upload, listed[:1])
        for key in ("k", "k2", "log"):
            bucket.delete_object(key)
        # The server removes what a cut upload left after the client has noticed the cut.
        wait_until(lambda: not list((tmp_path / "blobs").iterdir()))


def test_a_big_object_is_not_held_in_memory(tmp_path: Path) -> None:
    size, block = 256 << 20, b"\xa5" * (1 << 20)
    with command(tmp_path) as (process, bucket):
        bucket.enable_crc = False  # of the client: it is the slower side
        bucket.put_object("warm", b"x")
        memory = psutil.Process(process.pid).memory_info
        before = memory().rss
        highest = before

        def blocks() -> Iterator[bytes]:
            nonlocal highest
            for _ in range(size // len(block)):
                highest = max(highest, memory().rss)
                yield block

        assert bucket.put_object("big", blocks()).status == 200
        got, received = bucket.get_object("big"), 0
        assert got.content_length == size
        while chunk := got.read(1 << 20):
            received += len(chunk)
            highest = max(highest, memory().rss)
        assert received == size
        assert highest - before < 100 << 20
