"""``python -I trainer.pyz VERB``: a JSON request on stdin, a JSON reply on stdout, and on failure one clear line."""

from __future__ import annotations

import importlib
import sys
from typing import Dict, Tuple

from trainer import protocol

#: Verb → module, function, request class. A verb imports its own module only: its start is on every poll's way.
VERBS: Dict[str, Tuple[str, str, str]] = {
    "probe": ("trainer.probe", "probe", "ProbeRequest"),
    "arguments": ("trainer.swift_arguments", "arguments", "ArgumentsRequest"),
    "listen": ("trainer.network", "listen", "ListenRequest"),
    "reach": ("trainer.network", "reach", "ReachRequest"),
    "stage": ("trainer.stage", "stage", "StageRequest"),
    "start": ("trainer.start", "start", "StartRequest"),
    "commit": ("trainer.start", "commit", "CommitRequest"),
    "status": ("trainer.jobs", "status", "StatusRequest"),
    "stop": ("trainer.stop", "stop", "StopRequest"),
    "cancel": ("trainer.stop", "cancel", "CancelRequest"),
    "jobs": ("trainer.jobs", "jobs", "JobsRequest"),
    "checkpoints": ("trainer.checkpoints.scan", "checkpoints", "CheckpointsRequest"),
    "backup": ("trainer.transfer", "backup", "BackupRequest"),
    "mirror": ("trainer.mirror", "mirror", "MirrorRequest"),
    "prune": ("trainer.prune", "prune", "PruneRequest"),
    "sweep": ("trainer.sweep", "sweep", "SweepRequest"),
    "fetch": ("trainer.transfer", "fetch", "FetchRequest"),
}


def answer(verb: str, text: str) -> str:
    """The reply to one request, as one line of JSON.

    Raises:
        ProtocolError: the verb is unknown or the request has another shape.
    """
    if verb not in VERBS:
        raise protocol.ProtocolError(f"unknown verb {verb[:80]!r}; there are {', '.join(VERBS)}")
    module, function, request_class = VERBS[verb]
    request = protocol.loads(getattr(protocol, request_class), text)
    return protocol.dumps(getattr(importlib.import_module(module), function)(request))


def describe(verb: str, error: BaseException) -> str:
    """An error as one line for a human. Nothing of a request that was refused is repeated: it may hold a secret."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, protocol.ProtocolError):
        text = text.partition(": not JSON")[0] + ": not JSON" if ": not JSON" in text else text.partition(", got ")[0]
    kind = "" if isinstance(error, (ValueError, TimeoutError)) else f"{type(error).__name__}: "
    return f"{verb}: {kind}{text[:2000]}"


def main() -> int:
    """Run one verb; the exit status is 0 when the reply on stdout is the answer."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        reply = answer(verb, sys.stdin.buffer.read().decode("utf-8"))
    except Exception as error:
        sys.stderr.write(describe(verb or "trainer", error) + "\n")
        return 1
    sys.stdout.buffer.write(reply.encode("utf-8") + b"\n")
    return 0
