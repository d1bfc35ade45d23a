"""What the lines of a failed training mean: causes with their remedy, and consequences of something earlier.

Patterns and verdicts come from reports of ms-swift, DeepSpeed and PyTorch users; more than one of them learnt the hard
way that ``ChildFailedError`` and the NCCL watchdog say nothing about the cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """A line that tells something. ``permanent``: the same training fails in the same way however often it is tried."""

    name: str
    pattern: re.Pattern[str]
    advice: str
    permanent: bool = False


def _signature(name: str, pattern: str, advice: str, permanent: bool = False) -> Signature:
    return Signature(name, re.compile(pattern), advice, permanent)


#: Causes, the more telling first.
CAUSES: tuple[Signature, ...] = (
    _signature(
        "unknown argument",
        r"remaining_argv: |the following arguments are required|error: argument ",
        "correct swift.args in the recipe; names change between ms-swift versions",
        permanent=True,
    ),
    _signature(
        "world size changed",
        r"checkpoint being loaded used a DP world size",
        "resume on as many GPUs as the checkpoint was saved with, or with resume_only_model: true",
        permanent=True,
    ),
    _signature(
        "not resumable",
        r"Can't find a valid checkpoint at|Unable to find latest file|FileNotFoundError.*trainer_state\.json",
        "the checkpoint lacks its optimizer state on this node; check save_only_model and shared_dir",
        permanent=True,
    ),
    _signature(
        "GPU out of memory",
        r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "lower per_device_train_batch_size or max_length, or use zero3, offload or LoRA",
        permanent=True,
    ),
    _signature(
        "disk full",
        r"No space left on device|Errno 28",
        "free space on that node (checkpoints, caches)",
        permanent=True,
    ),
    _signature(
        "dataset",
        r"ArrowInvalid|DatasetGenerationError|The local path does not exist|Couldn't find any data file",
        "check the dataset's path and rows on that node",
        permanent=True,
    ),
    _signature(
        "module missing",
        r"ModuleNotFoundError: |ImportError: ",
        "install it in the training environment of every node",
        permanent=True,
    ),
    _signature(
        "port in use",
        r"EADDRINUSE|Address already in use",
        "another process holds the master port; the next try checks",
    ),
    _signature(
        "rendezvous",
        r"DistStoreError|waitForInput: poll|gai error|client socket has timed out|connectFullMesh failed",
        "a node never joined: check the address and master_port between the nodes",
    ),
    _signature(
        "network",
        r"ncclSystemError|ncclInternalError|ncclRemoteError|unhandled system error|ibv_\w+ failed",
        "check NCCL_SOCKET_IFNAME, NCCL_IB_HCA, memlock and the fabric of that node",
    ),
    _signature(
        "GPU fault",
        r"CUDA error: |uncorrectable ECC|an illegal memory access",
        "look at dmesg and nvidia-smi -q of that node; leave it out (param nodes) if it happens again",
    ),
    _signature("shared memory", r"Bus error", "enlarge /dev/shm of that node or lower dataloader_num_workers"),
)

#: Consequences: true until something earlier is found.
CASCADES: tuple[Signature, ...] = (
    _signature(
        "peer lost",
        r"Connection (reset|closed) by peer|Broken pipe|recvValue failed|Socket Timeout",
        "another rank was gone; look for the first failure",
    ),
    _signature(
        "collective timeout",
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for recv|watchdog got stuck",
        "a rank did not take part; look for one that stopped earlier",
    ),
    _signature("launcher", r"ChildFailedError|closing signal SIGTERM|CalledProcessError", "torchrun's own report"),
)
