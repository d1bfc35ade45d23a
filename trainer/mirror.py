"""The ``mirror`` verb: a process beside a job that sends each checkpoint to the bucket as soon as it is there.

It belongs to no tree of the job's: the training never waits for it, and nothing is lost when it dies. It writes no
manifest; what it has sent, the backup task proves again and does not send again. Its keys stay in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import time
from typing import Dict, Iterator, List, Optional, Tuple

from trainer import process, store, transfer
from trainer.checkpoints.scan import checkpoint_names
from trainer.checkpoints.watch import CheckpointWatch
from trainer.complaints import complaints, say
from trainer.detach import spawn_detached
from trainer.files import open_lock, remove_quietly, try_lock, write_atomic
from trainer.jobs import proven_state
from trainer.paths import JobPaths, NodePaths
from trainer.protocol import (
    BackupReply,
    BackupRequest,
    MirrorReply,
    MirrorRequest,
    MirrorState,
    OssTarget,
    Phase,
    dumps,
    loads,
)

POLL_S = 1.0
SETTLED_S = 20.0  # without a change, after which a part of a checkpoint that this node cannot judge counts as written
FIRST_PAUSE_S, LONGEST_PAUSE_S = 15.0, 600.0  # after an upload that failed
READY_S = 30
NAME = "swift-mirror"  # of the process, in the output of ps and top


def mirror(request: MirrorRequest) -> MirrorReply:
    """Start the mirror of a job, or hand new keys to the one that runs.

    Raises:
        PathError: the work folder or the job id is refused.
        OSError: the process cannot be started.
    """
    job = NodePaths(request.workdir).job(request.job_id)
    if proven_state(job).phase not in Phase.ALIVE:
        return MirrorReply(error=f"no job {request.job_id} runs on this node")
    lock = open_lock(job.mirror_lock)
    try:
        if not try_lock(lock):
            return _hand_over(job, request)
        return _start(job, request, lock)
    finally:
        os.close(lock)


def _hand_over(job: JobPaths, request: MirrorRequest) -> MirrorReply:
    try:
        pipe = os.open(job.mirror_keys, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            data = dumps(request.target).encode() + b"\n"
            if len(data) > select.PIPE_BUF:
                return MirrorReply(error=f"the keys are longer than {select.PIPE_BUF} bytes")
            os.write(pipe, data)
        finally:
            os.close(pipe)
    except OSError as error:
        return MirrorReply(error=f"the mirror runs, and takes no keys now: {error.strerror}")
    return MirrorReply(refreshed=True)


def _start(job: JobPaths, request: MirrorRequest, lock: int) -> MirrorReply:
    remove_quietly(job.mirror_keys)
    os.mkfifo(job.mirror_keys, 0o600)
    answer = spawn_detached(lambda ready: run(request, ready), job.mirror_log, (lock,), READY_S)
    return MirrorReply(started=answer == "ok", error=None if answer == "ok" else answer or "the mirror did not start")


def run(request: MirrorRequest, ready: int) -> int:
    """The body of the detached process; ``ready`` is the pipe to whoever started it."""
    process.set_name(NAME)
    try:
        following = Mirror(request)
    except Exception as error:
        os.write(ready, f"the mirror cannot start: {error}".encode())
        return 1
    signal.alarm(0)
    os.write(ready, b"ok")
    os.close(ready)
    following.follow()
    return 0


class Mirror:
    """Sends the checkpoints of one job from this node, oldest first, one at a time.

    Raises:
        StoreError: the bucket cannot be spoken to at all.
    """

    def __init__(self, request: MirrorRequest) -> None:
        self._request = request
        self._job = NodePaths(request.workdir).job(request.job_id)
        self._state_dir = request.state_dir or os.path.join(request.workdir, "uploads")
        store.yield_to_others()
        store.open_bucket(request.target)
        self._keyring = store.Keyring(request.target.credentials)
        self._keys = os.open(self._job.mirror_keys, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._watch = CheckpointWatch(request.output_dir)
        self._state = MirrorState()
        self._quiet: Dict[str, Tuple[object, float]] = {}
        self._passed: Dict[str, object] = {}
        self._not_before, self._pause = 0.0, FIRST_PAUSE_S
        self._next_look, self._over = 0.0, False

    def follow(self) -> None:
        """Run until the job has ended. What is not sent by then the backup task sends, without being slowed down."""
        while not self._is_over():
            name = self._next_checkpoint() if time.monotonic() >= self._not_before else None
            if name is None:
                time.sleep(POLL_S)
                continue
            with complaints("mirror"):
                self._send(name)
        self._write()
        remove_quietly(self._job.mirror_keys)

    def _is_over(self) -> bool:
        """Asked between two blocks of a file: whether the job has ended. Takes up new keys on the way."""
        now = time.monotonic()
        if now < self._next_look:
            return self._over
        self._next_look = now + POLL_S
        self._take_keys()
        self._over = proven_state(self._job).phase not in Phase.ALIVE
        return self._over

    def _take_keys(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self._keys, 1 << 16).splitlines():
                try:
                    self._keyring.replace(loads(OssTarget, line.decode()).credentials)
                    self._not_before = 0.0
                    say("new keys were handed over")
                except ValueError:  # its message would repeat them
                    say("keys that cannot be read were dropped")

    # -- which one -------------------------------------------------------------------------------------------

    def _next_checkpoint(self) -> Optional[str]:
        complete = self._watch.poll()
        for name in checkpoint_names(self._request.output_dir):
            files = self._files(name)
            if self._quiet.get(name, (None, 0.0))[0] != files:
                self._quiet[name] = (files, time.monotonic())
            if self._passed.get(name) == files:
                continue
            if name in complete or (
                self._request.partial and files and time.monotonic() - self._quiet[name][1] >= SETTLED_S
            ):
                return name
        return None

    def _files(self, name: str) -> List[Tuple[str, int, int]]:
        """This node's share of the files: path, size, modification time."""
        loads = [0] * self._request.shares
        mine = []
        everything = _walk(os.path.join(self._request.output_dir, name))
        for path, size, mtime in sorted(everything, key=lambda file: (-file[1], file[0])):
            least = loads.index(min(loads))  # every node that sees these files comes to the same answer
            loads[least] += size + 1
            if least == self._request.share:
                mine.append((path, size, mtime))
        return mine

    # -- sending ---------------------------------------------------------------------------------------------

    def _send(self, name: str) -> None:
        files = self._files(name)
        place = dataclasses.replace(self._request.target, prefix=self._request.target.key(name))
        request = BackupRequest(
            self._request.output_dir, name, [path for path, _, _ in files], place, self._request.node,
            self._state_dir, self._request.part_size, self._request.threads,
        )  # fmt: skip
        pace = store.Pace(0, self._request.bandwidth)
        self._state.checkpoint, self._state.error = name, None

        def cancelled() -> bool:
            if time.monotonic() >= self._next_look:
                self._tell(pace)
            return self._is_over()

        try:
            reply = transfer.send(request, self._keyring, pace, cancelled)
        except (store.StoreError, OSError) as error:
            reply = BackupReply(errors={"*": str(error)})
        self._tell(pace)
        self._state.checkpoint = ""
        if not reply.errors:
            self._passed[name], self._pause = list(files), FIRST_PAUSE_S
            self._state.safe = sorted({*self._state.safe, name}, key=lambda item: int(item.rpartition("-")[2]))
            self._state.sent, self._state.copied = self._state.sent + reply.sent, self._state.copied + reply.copied
            say(f"{name}: {len(reply.files)} files proven in {place.url}, {reply.sent} bytes sent in {reply.seconds} s")
        elif not self._over and os.path.isdir(os.path.join(self._request.output_dir, name)):
            path, why = next(iter(reply.errors.items()))
            self._state.error = f"{name}: {path}: {why}; {len(reply.errors)} of {len(files)} files; tried again"
            say(self._state.error)
            self._not_before = time.monotonic() + self._pause
            self._pause = min(LONGEST_PAUSE_S, 2 * self._pause)
        self._write()

    def _tell(self, pace: store.Pace) -> None:
        self._state.done, self._state.total = pace.done, pace.total
        self._state.rate, self._state.remaining_s = round(pace.rate), pace.remaining_s
        self._write()

    def _write(self) -> None:
        self._state.updated_at = time.time()
        with contextlib.suppress(OSError):  # a full disk is the supervisor's to tell
            write_atomic(self._job.mirror_state, dumps(self._state).encode())


def _walk(folder: str) -> Iterator[Tuple[str, int, int]]:
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(path)
                yield os.path.relpath(path, folder).replace(os.sep, "/"), stat.st_size, stat.st_mtime_ns
