"""The first cause and not the cascade, from logs as torchrun and ms-swift write them."""

from __future__ import annotations

import pytest

from swift_provider.planning.diagnosis import diagnose
from trainer.protocol import JobState, Phase, StopReason

REPORT = """\
E1130 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: {code}) local_rank: 0 (pid: 260)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
/env/swift/cli/sft.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_19:57:39
  host      : node{rank}
  rank      : {rank} (local_rank: 0)
  exitcode  : {code} (pid: 260)
  error_file: <N/A>
============================================================"""
PEER_LOST = "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:2119"


def report(rank: int, code: int) -> list[str]:
    return REPORT.format(rank=rank, code=code).splitlines()


def ended(code: int | None = 1, at: float = 1.0, **more: object) -> JobState:
    return JobState(job_id="j", phase=Phase.EXITED, exit_code=code, ended_at=at, **more)  # type: ignore[arg-type]


def test_a_killed_rank_beats_the_peer_that_noticed_first() -> None:
    states = {"node1": ended(at=5.0), "node2": ended(at=9.0)}
    tails = {"node1": ["step 50", PEER_LOST, *report(0, 1)], "node2": ["step 50", *report(1, -9)]}
    cause = diagnose(states, tails)
    assert cause is not None
    assert (cause.node, cause.rank, cause.kind, cause.time) == ("node2", 1, "rank killed", "2026-11-30_19:57:39")
    assert not cause.permanent
    assert "out-of-memory killer" in str(cause)


def test_what_the_supervisor_saw() -> None:
    dead = JobState(
        job_id="j",
        phase=Phase.KILLED,
        stop_reason=StopReason.RANK_FAILED,
        error="rank 3 (pid 77) died: SIGKILL",
        ended_at=2.0,
    )
    peer = JobState(job_id="j", phase=Phase.KILLED, stop_reason="node2 failed", ended_at=1.0)
    cause = diagnose({"node1": peer, "node2": dead}, {"node1": [PEER_LOST]})
    assert cause is not None
    assert (cause.node, cause.rank, cause.line) == ("node2", 3, "SIGKILL, pid 77")


@pytest.mark.parametrize(
    ("line", "kind", "permanent"),
    [
        ("ValueError: remaining_argv: ['--learning_ratee', '1e-4']", "unknown argument", True),
        ("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "GPU out of memory", True),
        ("OSError: [Errno 28] No space left on device: '/x'", "disk full", True),
        ("RuntimeError: ... code: -98, name: EADDRINUSE, message: address already in use", "port in use", False),
        ("torch.distributed.DistStoreError: wait timeout after 900000ms", "rendezvous", False),
        ("ModuleNotFoundError: No module named 'deepspeed.elasticity'", "module missing", True),
        ("ZeroDivisionError: integer division or modulo by zero", "exception", False),
        (PEER_LOST, "peer lost", False),
    ],
)
def test_kinds(line: str, kind: str, permanent: bool) -> None:
    cause = diagnose({"node1": ended()}, {"node1": ["INFO all is well", line, *report(0, 1)]})
    assert cause is not None
    assert (cause.kind, cause.permanent) == (kind, permanent)
    assert cause.node == "node1"


def test_a_cause_on_a_later_node_beats_a_cascade_on_the_first() -> None:
    states = {"node1": ended(at=1.0), "node2": ended(at=2.0)}
    cause = diagnose(states, {"node1": [PEER_LOST], "node2": ["RuntimeError: CUDA out of memory"]})
    assert cause is not None
    assert (cause.node, cause.kind) == ("node2", "GPU out of memory")


def test_what_a_stopped_job_said_while_dying_is_no_evidence() -> None:
    stopped = JobState(job_id="j", phase=Phase.KILLED, stop_reason="node2 failed", ended_at=1.0)
    states = {"node1": stopped, "node2": ended(code=7, at=2.0)}
    cause = diagnose(states, {"node1": ["ImportError: interrupted"], "node2": []})
    assert cause is not None
    assert (cause.node, cause.kind, cause.line) == ("node2", "unknown", "node2: exit status 7")


@pytest.mark.parametrize(
    "line",
    [
        "[INFO:swift] args: disk_cache='No space left on device'",
        "WARNING: optional import failed: ModuleNotFoundError: No module named 'wandb'",
        "training CUDA out of memory handling enabled",
    ],
)
def test_words_that_only_look_like_a_cause_never_forbid_another_try(line: str) -> None:
    cause = diagnose({"node1": ended()}, {"node1": [line, "RuntimeError: a hiccup", *report(0, 1)]})
    assert cause is not None
    assert not cause.permanent


def test_no_failure_no_cause() -> None:
    assert diagnose({"node1": ended(code=0)}, {}) is None
