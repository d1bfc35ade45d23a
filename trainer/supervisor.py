"""The supervisor: one detached process per job that starts the training, watches it and knows when it has ended.

It holds the node's lease for as long as any process of the job is left. As a child subreaper it inherits every orphan
of the tree, so the end is not a guess: ``waitpid`` answers ``ECHILD``. The log's own flock is inherited by every
process that writes to the log, so that "the supervisor is gone" and "nobody trains" stay two different facts.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time
from typing import Any, NamedTuple, Optional, Sequence, Set

from trainer import lease, process, records, torch_locks
from trainer.checkpoints.watch import CheckpointWatch
from trainer.complaints import complaints, say
from trainer.files import locked
from trainer.launch import launch, prove_launchable
from trainer.paths import JobPaths, NodePaths
from trainer.ports import PortPromise
from trainer.progress import ProgressReader
from trainer.protocol import Holder, Identity, JobSpec, JobState, MirrorState, Phase, StopReason
from trainer.ranks import RankWatch

TICK_S = 0.25  # longest sleep; the end of a child or of a rank and a signal wake it at once
HOLD_TICK_S = 0.03  # the same while a prepared job waits for the word to start, which may come as a file alone
KILL_TICK_S = 0.02
STATE_S = 1.0  # between two writes of state.json
SCAN_S = 2.0  # between two looks at the process tree; at the beginning, when the tree grows, more often
LINGER_S = 5.0  # that daemons may outlive the training process
RANK_PATIENCE_S = 2.5  # that the launcher has to end by itself after one of its ranks died
RANK_GRACE_S = 1.5  # between TERM and KILL after that
CANNOT_RUN = 127  # exit code of a command that could not be run, as shells say it
LAST_WORD_S = 120.0  # of tries to write how the job ended, on a disk that is full
STUCK_S = 20.0  # of KILL after which the processes that are left are reported


class Stop(NamedTuple):
    """A decision to end the job: why, and how long between TERM and KILL in seconds."""

    reason: str
    grace_s: float


class Supervisor:
    """One job from its lease to the last of its processes."""

    def __init__(self, node: NodePaths, job: JobPaths, spec: JobSpec) -> None:
        self._node, self._job, self._spec = node, job, spec
        now = time.time()
        # On the monotonic clock from here on: whoever sets the node's clock moves no end of a training.
        self._deadline = math.inf if spec.deadline is None else time.monotonic() + spec.deadline - now
        self._state = JobState(
            job_id=spec.job_id,
            phase=Phase.PREPARING,
            supervisor=process.identify(os.getpid()),
            owner=spec.owner,
            started_at=now,
        )
        self._poll = select.poll()
        self._ranks = RankWatch(self._poll, job.log)
        self._progress = ProgressReader(os.path.join(spec.output_dir, "logging.jsonl")) if spec.output_dir else None
        self._checkpoints = CheckpointWatch(spec.output_dir)
        self._port: Optional[PortPromise] = None
        self._began = time.monotonic()
        self._child_pid = 0
        self._child_ended: Optional[float] = None  # monotonic, like all that follow
        self._stop: Optional[Stop] = None
        self._stop_asked = False
        self._term_at: Optional[float] = None
        self._kill_at: Optional[float] = None
        self._killed: Set[Identity] = set()
        self._next_state = self._next_scan = 0.0

    # -- the beginning ----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Take the node for this job and prove that its training can start.

        Raises:
            OSError: it cannot: a program is missing, the port is taken.
            ValueError: the spec cannot be meant.
        """
        self._listen_to_signals()
        process.become_subreaper()
        since, supervisor = self._state.started_at, self._state.supervisor
        lease.write_notes(self._node, Holder(self._spec.job_id, self._spec.owner, since, supervisor, self._spec.gpus))
        prove_launchable(self._node, self._job, self._spec)
        self._port = PortPromise(self._spec.port) if self._spec.port is not None else None
        self._write_state(sync=True)

    def wait_for_commit(self, until: float) -> bool:
        """Wait for the word to start; ``False`` when a stop, the deadline or ``until`` (monotonic) came first.

        The decision falls here and nowhere else: a word that comes too late finds a job that has ended.
        """
        while True:
            committed = os.path.exists(self._job.commit)
            if committed:
                self.remove_stale_build_locks()  # takes a moment, so the decision comes after it
            now = time.monotonic()
            self._want_stop(now)
            if self._stop is None and now >= until:
                self._stop = Stop(StopReason.NOT_COMMITTED, 0.0)
            if self._stop is not None:
                self._state.stop_reason = self._stop.reason
                return False
            if committed:
                return True
            if now >= self._next_state:
                self._write_state()
            self._sleep(HOLD_TICK_S)

    def remove_stale_build_locks(self) -> None:
        """Without this a training that builds would wait for a lock that nobody will ever remove."""
        folder = torch_locks.extensions_folder({**os.environ, **self._spec.env})
        with complaints("build locks"), locked(self._node.build_lock):
            for path in torch_locks.remove_stale_locks(folder):
                say(f"removed the stale build lock {path}")

    def launch(self) -> None:
        """Start the training process.

        Raises:
            OSError: it cannot be started.
        """
        if self._port is not None:
            self._port.let_bind()
        self._began = time.monotonic()
        self._child_pid = launch(self._node, self._job, self._spec)
        self._state.child = process.identify(self._child_pid)
        self._state.phase = Phase.RUNNING
        with complaints("state"):  # from here on there is a training to look after
            self._write_state(sync=True)

    def give_up(self, error: str) -> None:
        """Note that a job that was prepared could not be launched."""
        self._state.error = error
        self._state.exit_code = CANNOT_RUN

    def _listen_to_signals(self) -> None:
        # Handlers, not SIG_IGN: an ignored signal would stay ignored in the training.
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, _wake)
        signal.signal(signal.SIGTERM, self._on_term)
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._poll.register(reader, select.POLLIN)
        self._wakeups = reader

    def _on_term(self, _number: int, _frame: Any) -> None:
        self._stop_asked = True

    # -- the middle -------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Run until no process of the job is left, that is, until the node may be given to another job."""
        while True:
            self._sleep(KILL_TICK_S if self._kill_at is not None else TICK_S)
            self._ranks.check()
            if self._reap():
                break
            now = time.monotonic()
            if now >= self._next_scan:
                self._scan(now)
            self._decide(now)
            if now >= self._next_state:
                self._look()
                self._write_state()
        # Marked processes outside the tree exist only if something adopted them; nothing may outlive the lease.
        killed, self._state.survivors = process.kill_until_empty(
            lambda: process.marked(self._node.workdir, self._spec.job_id)
        )
        self._state.killed = len(self._killed) + killed

    def _sleep(self, longest_s: float) -> None:
        self._poll.poll(1000 * longest_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeups, 4096)

    def _reap(self) -> bool:
        """Collect whoever ended; ``True`` when the kernel says that no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self._child_pid and self._child_ended is None:
                self._child_ended = time.monotonic()
                if os.WIFSIGNALED(status):
                    self._state.signal = os.WTERMSIG(status)
                else:
                    self._state.exit_code = os.WEXITSTATUS(status)

    def _scan(self, now: float) -> None:
        self._next_scan = now + min(SCAN_S, 0.25 + (now - self._began) / 10)
        processes = process.table()
        tree = process.descendants([os.getpid()], processes)
        self._ranks.update(tree, processes)
        with complaints("journal"):
            records.write_processes(self._job, tree)

    def _look(self) -> None:
        """Gather what the state tells about the training; trouble here never ends it."""
        with contextlib.suppress(OSError):
            self._state.log_bytes = os.stat(self._job.log).st_size
        if self._progress is not None:
            with complaints("progress"):
                self._state.progress = self._progress.poll()
        with complaints("checkpoints"):
            self._state.checkpoints = self._checkpoints.poll()
        self._state.mirror = records.read(MirrorState, self._job.mirror_state)

    # -- the decision to end ----------------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        self._want_stop(now)
        if self._stop is not None and self._term_at is None:
            self._terminate(now)
        elif self._kill_at is None and self._patience_is_over(now):
            self._kill_at = now
        if self._kill_at is not None:
            self._kill(now)

    def _want_stop(self, now: float) -> None:
        if self._stop_asked or (self._stop is None and os.path.exists(self._job.stop_request)):
            self._stop_asked = False
            intent = records.read_stop(self._job) or records.StopIntent(StopReason.SIGNAL)
            grace = self._spec.grace_s if intent.grace_s is None else intent.grace_s
            self._stop = Stop(intent.reason if self._stop is None else self._stop.reason, grace)
        elif self._stop is None and now >= self._deadline:
            self._stop = Stop(StopReason.DEADLINE, self._spec.grace_s)
        elif self._stop is None and self._rank_is_missed(now):
            self._stop = Stop(StopReason.RANK_FAILED, RANK_GRACE_S)

    def _rank_is_missed(self, now: float) -> bool:
        deaths = self._ranks.deaths if self._kill_at is None else []  # those that we killed are no news
        if deaths and self._state.error is None:
            self._state.error = str(deaths[0])
        return bool(deaths) and self._child_ended is None and now - deaths[0].at >= RANK_PATIENCE_S

    def _terminate(self, now: float) -> None:
        self._term_at = now
        self._state.phase = Phase.STOPPING
        self._state.stop_reason = self._stop.reason if self._stop else None
        with complaints("state"):
            self._write_state(sync=True)
        if self._child_ended is None:  # else its process group may be someone else's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child_pid, signal.SIGTERM)

    def _patience_is_over(self, now: float) -> bool:
        # The grace is for the tree: ms-swift's command dies of TERM at once while torchrun still cleans up.
        if self._stop is not None and self._term_at is not None:
            return now - self._term_at >= self._stop.grace_s
        return self._child_ended is not None and now - self._child_ended >= LINGER_S

    def _kill(self, now: float) -> None:
        left = process.descendants([os.getpid()]) | process.marked(self._node.workdir, self._spec.job_id)
        self._killed |= process.kill_all(left)
        self._state.killed = len(self._killed)
        if self._kill_at is not None and now - self._kill_at > STUCK_S:
            self._state.survivors = sorted(identity.pid for identity in left)

    # -- the end ----------------------------------------------------------------------------------------------

    def release(self, descriptors: Sequence[int]) -> None:
        """Give port and lease back: no process of the job is left."""
        if self._port is not None:
            self._port.give_back()
        lease.give_back(self._node, self._spec.gpus, descriptors)

    def finish(self) -> None:
        """Write how the job ended."""
        self._look()
        ended_by_itself = self._stop is None and self._state.signal is None
        self._state.phase = Phase.EXITED if ended_by_itself else Phase.KILLED
        self._state.ended_at = time.time()
        give_up = time.monotonic() + LAST_WORD_S
        while time.monotonic() < give_up:
            try:
                self._write_state(sync=True)
                break
            except OSError as error:
                say(f"cannot write the last state: {error}")
                time.sleep(1.0)

    def _write_state(self, sync: bool = False) -> None:
        self._next_state = time.monotonic() + STATE_S
        self._state.heartbeat += 1
        self._state.updated_at = time.time()
        if sync:
            records.write_state(self._job, self._state, sync=True)
            return
        with complaints("state"):  # a full disk must not end the training
            records.write_state(self._job, self._state)


def _wake(_number: int, _frame: Any) -> None:
    """Nothing: the wakeup descriptor has done it."""
