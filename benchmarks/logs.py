"""Log bytes from a node to Airflow: rate, delay and what is lost, against the SSH provider's own trigger for jobs.

Both triggers run as they are shipped, with their own pauses between polls (ours 2 s, the peer's 5 s), on the same file
at the same time. Delivered means handed to the task's logger, lost means never handed over by the time that the
trigger's event says how the job ended. The first row compares the reading alone with ``cat`` over plain asyncssh.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, run_cases
from benchmarks.nodes import connect, in_loop, loopback
from swift_provider.hooks.nodes import NodesHook
from swift_provider.triggers.follower import GangFollower
from swift_provider.triggers.gang import GangTrigger
from tests.cluster.sites import Site
from trainer import protocol
from trainer.process import identify
from trainer.protocol import JobState, Phase

# ruff: isort: split
from airflow.providers.ssh.triggers.ssh_remote_job import SSHRemoteJobTrigger

MB = 1_000_000
LINE = "{'loss': 1.23456789, 'grad_norm': 0.987, 'learning_rate': 1e-4, 'epoch': 0.37} 训练损失下降 %08d\n"
BACKLOG_MB, GROWTH_MB_S, GROWTH_S = 200, 10, 20


@dataclass
class Job:
    """A job's folder on a node, without a training: the log is what this benchmark writes."""

    folder: Path
    name: str = "job"
    written: int = 0
    crc: int = 0
    state: JobState = field(default_factory=lambda: JobState("job", Phase.RUNNING, supervisor=identify(os.getpid())))

    def write(self, size: int) -> None:
        """About ``size`` more bytes of log."""
        block = "".join(LINE % number for number in range(size // len(LINE.encode()) + 1)).encode()
        with open(self.folder / "log", "ab") as stream:
            stream.write(block)
        self.written, self.crc = self.written + len(block), zlib.crc32(block, self.crc)

    def say(self, phase: str) -> None:
        """The supervisor's word, and at the end also the exit code where the peer looks for it."""
        self.state.phase, self.state.heartbeat = phase, self.state.heartbeat + 1
        if phase == Phase.EXITED:
            self.state.exit_code = 0
            (self.folder / "exit_code").write_text("0")
        temporary = self.folder / "state.new"
        temporary.write_text(protocol.dumps(self.state))
        temporary.rename(self.folder / "state.json")


def make_job(site: Site) -> Job:
    folder = site.folder(site.nodes[0].name) / "jobs" / "job"
    folder.mkdir(parents=True)
    job = Job(folder)
    job.say(Phase.RUNNING)
    return job


class Ours(GangTrigger):
    """The shipped trigger; what it hands to the logger is counted instead."""

    delivered, crc, last = 0, 0, 0.0

    async def _write_log(self, lines: dict[str, list[str]]) -> None:
        for new in lines.values():
            data = ("\n".join(new) + "\n").encode()
            self.delivered, self.crc, self.last = (
                self.delivered + len(data),
                zlib.crc32(data, self.crc),
                time.monotonic(),
            )
            await asyncio.sleep(0)

    async def _publish(self, follower: GangFollower) -> None:
        pass

    async def _last_progress(self) -> None:
        return None


class Peer(SSHRemoteJobTrigger):
    """The provider's trigger; what it reads is counted, and not shown."""

    log = logging.getLogger("benchmarks.logs.peer")

    delivered, last = 0, 0.0

    async def _read_log_chunk(self, conn: Any) -> tuple[str, int]:
        text, offset = await super()._read_log_chunk(conn)
        self.delivered, self.last = self.delivered + len(text.encode()), time.monotonic()
        return text, offset


def triggers(site: Site, job: Job) -> tuple[Ours, Peer]:
    site.publish(site.nodes[0].name, extra={"no_host_key_check": True, "host_key": None})
    plan = site.plan()
    ours = Ours([node.model_dump(mode="json") for node in plan.nodes], plan.python, job.name, {})
    log, code = str(job.folder / "log"), str(job.folder / "exit_code")
    return ours, Peer(site.conn_id("node1"), None, job.name, str(job.folder), log, code, "posix")


async def to_the_event(trigger: Any) -> float:
    """When the trigger said that the job is over."""
    async for _ in trigger.run():
        break
    return time.monotonic()


async def both(ours: Ours, peer: Peer) -> None:
    await asyncio.gather(to_the_event(ours), to_the_event(peer))
    await ours.cleanup()


def backlog() -> list[Row]:
    """A log that is already there, of a job that has ended."""
    with loopback(1) as site:
        job = make_job(site)
        job.write(BACKLOG_MB * MB)
        rates = [(cat(site, job), follow(site, job)) for _ in range(3)]
        job.say(Phase.EXITED)
        ours, peer = triggers(site, job)
        began = time.monotonic()
        in_loop(lambda: both(ours, peer))
        assert (ours.delivered, ours.crc) == (job.written, job.crc), "bytes were lost"
        cat_rate, our_rate = (sorted(pair[index] for pair in rates)[1] for index in (0, 1))
        return [
            Row(
                f"{BACKLOG_MB} MB there: follower's rate",
                our_rate,
                cat_rate,
                "MB/s",
                "median of 3; peer: cat over asyncssh",
            ),
            Row(
                "  delivered by the shipped trigger",
                ours.delivered / MB,
                peer.delivered / MB,
                "MB",
                "peer: SSHRemoteJobTrigger",
            ),
            Row("  lost", (job.written - ours.delivered) / MB, (job.written - peer.delivered) / MB, "MB", "same"),
            Row("  last byte after", ours.last - began, peer.last - began, "s", "same"),
        ]


def cat(site: Site, job: Job) -> float:
    async def work() -> float:
        async with await connect(site.nodes[0]) as connection:
            began = time.monotonic()
            done = await connection.run(f"cat {job.folder}/log", encoding=None)
            assert len(done.stdout or b"") == job.written
            return job.written / MB / (time.monotonic() - began)

    return in_loop(work)


def follow(site: Site, job: Job) -> float:
    async def work() -> float:
        async with NodesHook.for_plan(site.plan()).group() as group:
            await group.sessions["node1"].connect()
            follower = GangFollower(group, job.name)
            began, count, crc = time.monotonic(), 0, 0
            while count < job.written:
                for lines in (await follower.poll()).values():
                    data = ("\n".join(lines) + "\n").encode()
                    count, crc = count + len(data), zlib.crc32(data, crc)
            assert (count, crc) == (job.written, job.crc), "bytes were lost"
            return job.written / MB / (time.monotonic() - began)

    return in_loop(work)


def growing() -> list[Row]:
    """A log that grows while both follow it, and then ends."""
    with loopback(1) as site:
        job = make_job(site)
        ours, peer = triggers(site, job)
        ended: list[float] = []

        def grow() -> None:
            began = time.monotonic()
            for tick in range(GROWTH_S * 10):
                job.write(GROWTH_MB_S * MB // 10)
                if tick % 10 == 0:
                    job.say(Phase.RUNNING)
                time.sleep(max(0.0, began + (tick + 1) / 10 - time.monotonic()))
            job.say(Phase.EXITED)
            ended.append(time.monotonic())

        writer = threading.Thread(target=grow)
        writer.start()
        in_loop(lambda: both(ours, peer))
        writer.join()
        assert (ours.delivered, ours.crc) == (job.written, job.crc), "bytes were lost"
        note = f"{GROWTH_MB_S} MB/s for {GROWTH_S} s"
        return [
            Row(
                "growing log: delivered",
                ours.delivered / MB,
                peer.delivered / MB,
                "MB",
                f"{note}; peer: SSHRemoteJobTrigger",
            ),
            Row("  lost", (job.written - ours.delivered) / MB, (job.written - peer.delivered) / MB, "MB", "same"),
            Row("  last byte after the job's end", ours.last - ended[0], peer.last - ended[0], "s", "same"),
        ]


if __name__ == "__main__":
    sys.exit(run_cases("benchmarks.logs", {"backlog": backlog, "growing": growing}, __doc__ or ""))
