"""The body of the detached process: one job from its lease to its last word, told to whoever started it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import List

from trainer import records
from trainer.complaints import say
from trainer.paths import NodePaths
from trainer.supervisor import Supervisor


def supervise(workdir: str, job_id: str, descriptors: str, hold: str) -> int:
    """Supervise one job.

    ``descriptors`` are the pipe to whoever started this process, the locked start lock, and the locks of the lease;
    ``hold`` the seconds to wait for the word to start (0: none is needed). All are the text of numbers.
    """
    ready, turn, *lease = [int(number) for number in descriptors.split(",")]
    hold_s = float(hold)
    for descriptor in (ready, turn, *lease):
        os.set_inheritable(descriptor, False)
    try:
        supervisor = _begin(workdir, job_id, lease, at_once=hold_s <= 0)
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


def _begin(workdir: str, job_id: str, lease: List[int], at_once: bool) -> Supervisor:
    """A supervisor whose job is prepared, or runs.

    Raises:
        Exception: it cannot start; lease and port are free and no state is left behind.
    """
    node = NodePaths(workdir)
    job = node.job(job_id)
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
