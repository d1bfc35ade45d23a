"""What an engine is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift_provider.config.errors import shorten
from swift_provider.planning.shape import ModelShape

#: A lost peer would otherwise hang for ms-swift's default of 18,000,000 s (208 days).
DDP_TIMEOUT_S = 1800
#: Outside of these a timeout works and is seldom meant.
LEAST_DDP_TIMEOUT_S, MOST_DDP_TIMEOUT_S = 120, 6 * 3600


@dataclass(frozen=True)
class Setting:
    """Where a training runs. ``files`` are those of the job's folder, which engines may add to (``{job_dir}/name``).

    ``shared`` says that all nodes write into one disk; ``shape`` is the model's, where its config.json is at hand.
    """

    command: str
    device: str = "gpu"
    nodes: int = 1
    world_size: int = 1
    shared: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    config_dir: Path | None = None
    shape: ModelShape | None = None


@dataclass(frozen=True)
class Finding:
    """Something about the arguments: refused, or with ``warning`` only remarked. ``key`` is that of the file.

    ``cluster`` says that it is the cluster file where it is to be mended.
    """

    key: str
    problem: str
    warning: bool = False
    cluster: bool = False


@dataclass(frozen=True)
class Batch:
    """Samples per optimizer step: ``micro`` on each of ``data_parallel`` replicas, ``accumulation`` times."""

    micro: int
    accumulation: int
    data_parallel: int

    @property
    def size(self) -> int:
        """The global batch."""
        return self.micro * self.accumulation * self.data_parallel


def argument(name: str, problem: str, *, warning: bool = False) -> Finding:
    """A finding about an ms-swift argument."""
    return Finding(f"swift.args.{name}", problem, warning)


def truth(value: Any) -> bool:
    """A switch as ms-swift reads it, from YAML's own or from a text."""
    return value if isinstance(value, bool) else str(value).lower() in {"true", "yes", "t", "y", "1"}


def whole(args: Mapping[str, Any], name: str, default: int) -> int:
    """A number from 1 on; ``default`` where there is none (a wrong one is for :func:`check_numbers`)."""
    number = _number(args.get(name))
    return default if number is None or number < 1 else number


def check_numbers(args: Mapping[str, Any], names: Iterable[str]) -> list[Finding]:
    """Those of ``names`` that are set, and not to a whole number from 1 on."""
    return [
        argument(name, f"must be a whole number from 1 on (got {shorten(args[name])})")
        for name in names
        if args.get(name) is not None and (_number(args[name]) or 0) < 1
    ]


def _number(value: Any) -> int | None:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def check_timeout(args: Mapping[str, Any]) -> list[Finding]:
    """How long ranks wait for a lost one; the watchdog of PyTorch ends them only after that."""
    seconds = _number(args.get("ddp_timeout"))
    if seconds is None:
        return []  # none, or a wrong type, which is said already
    if seconds < 1:
        return [argument("ddp_timeout", f"must be seconds from 1 on; leave it out for {DDP_TIMEOUT_S} (got {seconds})")]
    if seconds < LEAST_DDP_TIMEOUT_S:
        problem = f"{seconds} s is less than saving a checkpoint or tokenizing may take; leave it out"
        return [argument("ddp_timeout", f"{problem} for {DDP_TIMEOUT_S} s", warning=True)]
    if seconds > MOST_DDP_TIMEOUT_S:
        problem = f"a lost peer would hold every GPU for {seconds / 3600:,.1f} h; leave it out for {DDP_TIMEOUT_S} s"
        return [argument("ddp_timeout", problem, warning=True)]
    return []


def check_precision(args: Mapping[str, Any], device: str) -> list[Finding]:
    """Number formats that work and are seldom meant."""
    if device == "cpu":
        return []
    dtype = str(args.get("torch_dtype"))
    if dtype == "float16" or truth(args.get("fp16")):
        problem = "float16 overflows where bfloat16 does not; write torch_dtype: bfloat16 on GPUs from A100 on"
        return [argument("torch_dtype" if dtype == "float16" else "fp16", problem, warning=True)]
    if dtype == "float32" and args.get("fp16") is None:
        problem = "ms-swift turns on float16 autocast with float32 weights; write bf16: true, or fp16: false"
        return [argument("torch_dtype", problem, warning=True)]
    return []
