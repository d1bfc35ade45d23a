"""Four shards from a sink on loopback into files, ours against others."""

from __future__ import annotations

import shutil
import sys

from benchmarks.harness import Row, run_cases
from benchmarks.transfer import MB, ROUNDS, SHARD, best, clients, run_client, sink, workplace, write_shards


def against_others() -> list[Row]:
    """MB/s of each; ``ours`` proves every file by CRC64, syncs it to the disk, and resumes."""
    with workplace() as place:
        write_shards(place / "served", 1)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in clients()}
        with sink(place / "served") as endpoint:
            for _ in range(ROUNDS):
                for name, found in runs.items():
                    (place / "to").mkdir()
                    found.append(run_client(name, "receive", endpoint, place / "to"))
                    shutil.rmtree(place / "to")
                    shutil.rmtree(place / "oss2", ignore_errors=True)
    fastest = {name: best(found) for name, found in runs.items()}
    mine = fastest.pop("ours")
    rate = 4 * SHARD / MB / mine["seconds"]
    rows = [
        Row(f"download 4 x {SHARD >> 20} MiB, peer: {name}", rate, 4 * SHARD / MB / peer["seconds"], "MB/s",
            f"CPU {mine['cpu']:.1f} s, theirs {peer['cpu']:.1f} s")
        for name, peer in fastest.items()
    ]  # fmt: skip
    peak = max(run["peak"] for run in runs["ours"])
    return [*rows, Row("peak memory of the downloader", peak / MB, None, "MB")]


CASES = {"against-others": against_others}

if __name__ == "__main__":
    sys.exit(run_cases("benchmarks.download", CASES, __doc__ or ""))
