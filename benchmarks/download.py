"""Four shards from a sink on loopback into files, ours against others."""

from __future__ import annotations

import shutil
import sys

from benchmarks.harness import Row, run_cases
from benchmarks.transfer import ROUNDS, clients, peak_memory, rates, run_client, sink, workplace, write_shards


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
    return [*rates("download", runs), peak_memory("downloader", runs)]


CASES = {"against-others": against_others}

if __name__ == "__main__":
    sys.exit(run_cases("benchmarks.download", CASES, __doc__ or ""))
