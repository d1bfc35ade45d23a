"""A short soak, and what long ones have found."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from swift_provider.exceptions import GangStartFailed, NodeLost, TrainingStopped
from swift_provider.operators.train import failure_of
from swift_provider.planning.gang import START_FAILED, first_failure
from tests.cluster.sites import Site
from tests.cluster.soak import Soak
from trainer.protocol import JobState, Phase, StopReason

RUNS = 15
SECONDS = 60.0  # on a busy machine there are fewer runs


@pytest.mark.skipif(
    not os.environ.get("SOAK_SEED"), reason="set SOAK_SEED=random or a number; `make soak` is the long one"
)
def test_runs_under_random_faults(tmp_path: Path) -> None:
    wanted = os.environ["SOAK_SEED"]
    seed = random.SystemRandom().randrange(10**6) if wanted == "random" else int(wanted)
    print(f"repeat with: python -m tests.cluster.soak --runs {RUNS} --seed {seed}")  # noqa: T201
    limit = time.monotonic() + SECONDS
    with Soak(tmp_path, seed) as soak:
        for index in range(RUNS):
            trial = soak.trial(index)
            assert not trial.problems, "\n".join([f"seed {seed}, run {index}", *trial.story, *trial.problems])
            if time.monotonic() > limit:
                break


def test_a_log_that_grows_while_it_is_read_has_no_byte_that_was_never_written(site: Site) -> None:
    """Blocks are read in parallel: one that met the end of the file came back as zeros when the next one did not."""
    path = site.folder("node1") / "log"
    path.parent.mkdir(parents=True)
    path.touch()
    block = b"0123456789abcde\n" * 65536
    writer = os.fork()
    if writer == 0:  # a process of its own, since the reader needs this one
        with open(path, "ab", buffering=0) as stream:
            for _ in range(1000):
                stream.write(block)
                time.sleep(0.003)
        os._exit(0)

    async def read(group) -> None:
        session, offset, limit = group.sessions["node1"], 0, time.monotonic() + 6.0
        while time.monotonic() < limit:
            offset = max(offset, path.stat().st_size // 16 * 16 - 65536)
            data = await session.read(str(path), offset, 4 << 20)
            assert b"\0" not in data
            offset += len(data) // 16 * 16

    try:
        site.with_group(site.plan(), read)
    finally:
        os.kill(writer, 9)
        os.waitpid(writer, 0)


@pytest.mark.parametrize(
    ("phases", "reasons", "kind"),
    [
        # A reboot during the start: another controller of the task could not start the gang and buried the lost job.
        ((Phase.KILLED, Phase.LOST), (START_FAILED, START_FAILED), NodeLost),
        ((Phase.KILLED, Phase.KILLED), (START_FAILED, START_FAILED), GangStartFailed),
        ((Phase.KILLED, Phase.KILLED), (StopReason.REQUESTED, StopReason.REQUESTED), TrainingStopped),
    ],
)
def test_what_another_controller_did_is_no_stop_by_hand(phases, reasons, kind) -> None:
    states = {
        f"node{number}": JobState("job", phase, stop_reason=reason, ended_at=float(number))
        for number, phase, reason in zip((1, 2), phases, reasons, strict=True)
    }
    failure = first_failure(states)
    assert failure is not None
    assert type(failure_of(failure, states, {})) is kind
