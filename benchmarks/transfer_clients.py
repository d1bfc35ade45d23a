"""One transfer by one client, in a process of its own: prints seconds, peak memory and bytes. Imports nothing of ours
unless asked: other clients live in other environments.

``python transfer_clients.py CLIENT send|receive ENDPOINT FOLDER [PREFIX]``
"""

from __future__ import annotations

import http.client
import importlib
import json
import resource
import shutil
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

PART = 10 << 20
KEYS = ("LTAI-bench", "bench-secret")
REGION, BUCKET = "cn-hangzhou", "bench"


def ours(send: bool, endpoint: str, folder: Path, prefix: str) -> dict[str, int]:
    """The node side's own verbs."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from trainer import store, transfer
    from trainer.protocol import BackupRequest, OssCredentials, OssTarget

    target = OssTarget(endpoint, REGION, BUCKET, prefix, OssCredentials(*KEYS))
    if send:
        names = sorted(path.name for path in folder.iterdir())
        state = str(folder.parent / "state")
        reply = transfer.backup(BackupRequest(str(folder.parent), folder.name, names, target, state_dir=state))
        if reply.errors:
            raise SystemExit(str(reply.errors))
        return {"sent": reply.sent, "copied": reply.copied, "files": len(reply.files)}
    bucket = store.open_bucket(target, connections=8)
    wanted = []
    for name in NAMES:
        stored = store.head(bucket, target.key(name))
        assert stored is not None
        wanted.append(store.Wanted(stored.key, str(folder / name), stored.size, stored.crc64))
    return {"received": store.get_files(bucket, wanted)}


NAMES = [f"shard-{number}.pt" for number in range(4)]


def oss2_defaults(send: bool, endpoint: str, folder: Path, prefix: str) -> dict[str, int]:
    """What its documentation shows first."""
    import oss2

    bucket = oss2.Bucket(oss2.AuthV4(*KEYS), endpoint, BUCKET, region=REGION)
    store = folder.parent / "oss2"
    for name in NAMES:
        if send:
            kept = oss2.ResumableStore(root=str(store))
            oss2.resumable_upload(bucket, f"{prefix}/{name}", str(folder / name), store=kept)
        else:
            kept = oss2.ResumableDownloadStore(root=str(store))
            oss2.resumable_download(bucket, f"{prefix}/{name}", str(folder / name), store=kept)
    return {}


def opendal(send: bool, endpoint: str, folder: Path, prefix: str) -> dict[str, int]:
    """Rust; it does not compare CRC64."""
    import opendal as dal

    operator = dal.Operator(
        "oss", bucket=BUCKET, endpoint=endpoint, access_key_id=KEYS[0], access_key_secret=KEYS[1],
        addressing_style="path", root="/",
    )  # fmt: skip
    for name in NAMES:
        if send:
            with (
                (folder / name).open("rb") as source,
                operator.open(f"{prefix}/{name}", "wb", chunk=PART, concurrent=4) as sink,
            ):
                shutil.copyfileobj(source, sink, PART)
        else:
            with (
                operator.open(f"{prefix}/{name}", "rb", chunk=PART, concurrent=4) as source,
                (folder / name).open("wb") as sink,
            ):
                shutil.copyfileobj(source, sink, PART)
    return {}


def raw(send: bool, endpoint: str, folder: Path, prefix: str) -> dict[str, int]:
    """A bare loop over one connection with CRC64: the least that a proven transfer can do."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from trainer.store import crc64

    url = urlsplit(endpoint)
    connection = http.client.HTTPConnection(url.hostname or "", url.port)
    buffer = memoryview(bytearray(PART))
    for name in NAMES:
        if not send:
            connection.request("GET", f"/{BUCKET}/{prefix}/{name}")
            answer, crc = connection.getresponse(), 0
            with (folder / name).open("wb") as sink:
                while count := answer.readinto(buffer):
                    crc = crc64.update(crc, buffer[:count])
                    sink.write(buffer[:count])
            assert answer.headers["x-oss-hash-crc64ecma"] == str(crc)
            continue
        with (folder / name).open("rb", buffering=0) as source:
            number = 0
            while count := source.readinto(buffer):
                number += 1
                crc = crc64.update(0, buffer[:count])
                connection.request("PUT", f"/{BUCKET}/{prefix}/{name}.{number}", buffer[:count])
                answer = connection.getresponse()
                answer.read()
                assert answer.headers["x-oss-hash-crc64ecma"] == str(crc)
    return {}


def main() -> None:
    """Run and print."""
    client, direction, endpoint, folder = sys.argv[1:5]
    prefix = sys.argv[5] if len(sys.argv) > 5 else "run/checkpoint-1"
    run = {"ours": ours, "oss2": oss2_defaults, "opendal": opendal, "raw": raw}[client]
    importlib.import_module({"ours": "oss2", "oss2": "oss2", "opendal": "opendal", "raw": "http.client"}[client])
    began, cpu = time.monotonic(), time.process_time()
    facts = run(direction == "send", endpoint, Path(folder), prefix)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": peak, **facts}))


if __name__ == "__main__":
    main()
