"""What the two transfer benchmarks share: files, the sink, and the clients, each run in turn, several times over."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import PROJECT, Row
from tests.oss_server.client_envs import InstallError, python_environment

#: Bytes per shard; SWIFT_BENCH_MIB changes it.
SHARD = int(os.environ.get("SWIFT_BENCH_MIB", "1024")) << 20
ROUNDS = 3
MB = 1e6


def write_shards(folder: Path, seed: int, numbers: range = range(4)) -> None:
    """Files that no two of which are alike."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        noise = random.Random(seed * 100 + number)  # noqa: S311
        with (folder / f"shard-{number}.pt").open("wb") as stream:
            for _ in range(SHARD >> 20):
                stream.write(noise.randbytes(1 << 20))


@contextlib.contextmanager
def sink(folder: Path) -> Iterator[str]:
    """The address of a running sink that serves ``folder``."""
    command = [sys.executable, "-m", "benchmarks.sink", str(folder)]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.kill()


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
        yield Path(name)


def clients() -> list[str]:
    """Those that can run here."""
    try:
        python_environment()
    except InstallError:
        return ["ours", "raw", "oss2"]
    return ["ours", "raw", "oss2", "opendal"]


def run_client(client: str, direction: str, endpoint: str, folder: Path, *more: str) -> dict[str, Any]:
    """Seconds, CPU seconds, peak memory in bytes, and what the client says of itself."""
    python = python_environment() if client == "opendal" else Path(sys.executable)
    script = PROJECT / "benchmarks" / "transfer_clients.py"
    command = [str(python), str(script), client, direction, endpoint, str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{client} failed: {done.stderr[-2000:]}")
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest run: what others took of the machine only ever slows down."""
    return min(runs, key=lambda run: float(run["seconds"]))


def rates(word: str, runs: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """MB/s of ours against each peer, from the best run of each client; ``word`` says which way the bytes went."""
    fastest = {name: best(found) for name, found in runs.items()}
    mine = fastest.pop("ours")
    rate = 4 * SHARD / MB / mine["seconds"]
    return [
        Row(f"{word} 4 x {SHARD >> 20} MiB, peer: {name}", rate, 4 * SHARD / MB / peer["seconds"], "MB/s",
            f"CPU {mine['cpu']:.1f} s, theirs {peer['cpu']:.1f} s")
        for name, peer in fastest.items()
    ]  # fmt: skip


def peak_memory(whose: str, runs: dict[str, list[dict[str, Any]]]) -> Row:
    """The most memory that ours took in any run."""
    return Row(f"peak memory of the {whose}", max(run["peak"] for run in runs["ours"]) / MB, None, "MB")
