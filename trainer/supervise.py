"""The body of the detached process: one job from its lease to its last word, told to whoever started it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Sequence

from trainer import process, records
from trainer.complaints import say
from trainer.paths import JobPaths, NodePaths
from trainer.supervisor import Supervisor

NAME = "swift-job"  # of a supervisor, in the output of ps and top


def supervise(node: NodePaths, job: JobPaths, *, ready: int, turn: int, lease: Sequence[int], hold_s: float) -> int:
    """Supervise one job; returns the exit status of this process.

    Args:
        node: of the job.
        job: its spec is there.
        ready: the pipe to whoever started this process.
        turn: the locked start lock.
        lease: the locks of the lease.
        hold_s: seconds to wait for the word to start (0: none is needed).
    """
    process.set_name(NAME)
    try:
        supervisor = _begin(node, job, lease, at_once=hold_s <= 0)
    except Exception as error:
        _answer(ready, f"cannot start the training: {error}")
        return 1
    until = time.monotonic() + hold_s  # counted from before the answer, however late this process runs again
    signal.alarm(0)
    os.close(turn)
    _answer(ready, "ok")
    if hold_s <= 0 or (supervisor.wait_for_commit(until) and _launch(supervisor)):
        supervisor.follow()
    supervisor.release(lease)  # before the last state: whoever reads that the job ended may use the node at once
    supervisor.finish()
    return 0


def _begin(node: NodePaths, job: JobPaths, lease: Sequence[int], at_once: bool) -> Supervisor:
    """A supervisor whose job is prepared, or runs.

    Raises:
        Exception: it cannot start; lease and port are free and no state is left behind.
    """
    spec = records.read_spec(job)
    if spec is None:
        raise FileNotFoundError(f"{job.spec} is missing or unreadable")
    supervisor = Supervisor(node, job, spec)
    try:
        supervisor.prepare()
        if at_once:
            supervisor.remove_stale_build_locks()
            supervisor.launch()
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(job.state)
        supervisor.release(lease)
        raise
    return supervisor


def _launch(supervisor: Supervisor) -> bool:
    try:
        supervisor.launch()
    except Exception as error:
        say(f"cannot start the training: {error}")
        supervisor.give_up(f"cannot start the training: {error}")
        return False
    return True


def _answer(ready: int, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever started us is gone; the job goes on
        os.write(ready, text.encode())
    os.close(ready)
