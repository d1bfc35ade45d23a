"""Four shards to a sink on loopback, ours against others; a second checkpoint; checkpoints among many objects."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from pathlib import Path

import oss2

from benchmarks.harness import Row, run_cases
from benchmarks.transfer import MB, ROUNDS, clients, peak_memory, rates, run_client, sink, workplace, write_shards
from benchmarks.transfer_clients import BUCKET, KEYS, REGION
from local.oss_server.records import BucketRecord, ObjectRecord, dump
from local.oss_server.serving import running_server
from local.oss_server.storage import Storage
from trainer import store
from trainer.protocol import Manifest, OssCredentials, OssTarget, StoredFile


def against_others() -> list[Row]:
    """MB/s of each; ``ours`` proves every object by CRC64, resumes, and knows what is there already."""
    with workplace() as place:
        write_shards(place / "checkpoint-1", 1)
        (place / "empty").mkdir()
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in clients()}
        for number in range(ROUNDS):
            for name, found in runs.items():
                for records in ("state", "oss2"):
                    shutil.rmtree(place / records, ignore_errors=True)
                with sink(place / "empty") as endpoint:
                    prefix = f"run{number}/checkpoint-1"
                    found.append(run_client(name, "send", endpoint, place / "checkpoint-1", prefix))
    return [*rates("upload", runs), peak_memory("uploader", runs)]


def second_checkpoint() -> list[Row]:
    """Bytes sent of a checkpoint of which three fifths are in the bucket already, under the run's previous one."""
    with workplace() as place:
        (place / "empty").mkdir()
        write_shards(place / "checkpoint-1", 1, range(5))
        write_shards(place / "checkpoint-2", 1, range(3))
        write_shards(place / "checkpoint-2", 2, range(3, 5))
        with sink(place / "empty") as endpoint:
            # The sink knows objects by their last name: what is copied must have another one.
            first = run_client("ours", "send", endpoint, place / "checkpoint-1", "run/checkpoint-1")
            for path in sorted((place / "checkpoint-2").iterdir()):
                path.rename(path.with_name(f"second-{path.name}"))
            second = run_client("ours", "send", endpoint, place / "checkpoint-2", "run/checkpoint-2")
    rows = [Row("second checkpoint, 60 % as before: bytes sent", second["sent"] / MB, first["sent"] / MB, "MB")]
    return [*rows, Row("the same: seconds", second["seconds"], first["seconds"])]


def many_objects() -> list[Row]:
    """Finding ten checkpoints among 100 000 objects, manifests read and checked, against the bare listing."""
    with workplace() as place:
        _fill(place)
        with running_server(place, {KEYS[0]: KEYS[1]}, buckets=[BUCKET], region=REGION) as server:
            target = OssTarget(server.endpoint, REGION, BUCKET, "run", OssCredentials(*KEYS))
            for number in range(10):
                manifest = Manifest(f"checkpoint-{number}", number, "full", "complete", FILES)
                store.write_manifest(dataclasses.replace(target, prefix=f"run/checkpoint-{number}"), manifest)
            bucket = oss2.Bucket(oss2.AuthV4(*KEYS), server.endpoint, BUCKET, region=REGION)
            bare, planned = [], []
            for _ in range(ROUNDS):
                began = time.monotonic()
                count = sum(1 for _ in oss2.ObjectIteratorV2(bucket, prefix="run/", max_keys=1000))
                middle = time.monotonic()
                assert (count, len(store.find_manifests(target))) == (100_010, 10)
                bare.append(middle - began)
                planned.append(time.monotonic() - middle)
    return [Row("find 10 checkpoints among 100 000 objects, peer: bare listing", min(planned), min(bare))]


FILES = [StoredFile(f"shard-{number:05}.pt", 1000, str(number)) for number in range(10_000)]


def _fill(place: Path) -> None:
    """100 000 objects in the index of a server that does not run yet."""
    storage = Storage(place)
    storage.create_bucket(BucketRecord(BUCKET, 0.0))
    record = dump(ObjectRecord("0" * 32, 0, 0.0, (), {}))
    with storage.database.transaction() as db:
        for number in range(10):
            keys = [(BUCKET, f"run/checkpoint-{number}/{file.path}".encode(), record) for file in FILES]
            db.executemany("INSERT INTO objects VALUES (?, ?, ?)", keys)
    storage.close()


CASES = {"against-others": against_others, "second-checkpoint": second_checkpoint, "many-objects": many_objects}

if __name__ == "__main__":
    sys.exit(run_cases("benchmarks.upload", CASES, __doc__ or ""))
