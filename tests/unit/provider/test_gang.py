"""What states mean together, and log bytes as lines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_provider.planning.gang import (
    Step,
    cancel_reason,
    cancelled_try,
    describe_end,
    ended_well,
    first_failure,
    next_step,
)
from swift_provider.triggers.logs import LogCursor
from trainer.protocol import JobState, Phase


def state(phase: str, code: int | None = None, **more: object) -> JobState:
    return JobState(job_id="j", phase=phase, exit_code=code, **more)  # type: ignore[arg-type]


DONE, RUNS, ABSENT = state(Phase.EXITED, 0), state(Phase.RUNNING), state(Phase.ABSENT)
BROKE, STOPS, LOST = state(Phase.EXITED, 1), state(Phase.STOPPING), state(Phase.LOST)


@pytest.mark.parametrize(
    ("states", "step"),
    [
        ([DONE, DONE], Step.FINISHED),
        ([RUNS, RUNS], Step.JOIN),
        ([ABSENT, ABSENT], Step.JOIN),
        ([RUNS, ABSENT], Step.JOIN),  # the start was cut short between two nodes
        ([DONE, RUNS], Step.JOIN),  # the last ranks are saving
        ([STOPS, RUNS], Step.WAIT),
        ([BROKE, RUNS], Step.NEXT),
        ([LOST, RUNS], Step.NEXT),
        ([DONE, ABSENT], Step.NEXT),  # cannot have been one world
        ([BROKE, BROKE], Step.NEXT),
    ],
)
def test_next_step(states: list[JobState], step: Step) -> None:
    for order in itertools.permutations(states):
        assert next_step({str(index): item for index, item in enumerate(order)}) is step


@given(st.lists(st.sampled_from([DONE, RUNS, ABSENT, BROKE, STOPS, LOST]), min_size=1, max_size=8))
def test_a_gang_with_a_failed_member_is_never_joined(states: list[JobState]) -> None:
    step = next_step({str(index): item for index, item in enumerate(states)})
    if any(item in (BROKE, LOST) for item in states):
        assert step in (Step.NEXT, Step.WAIT)
    if step is Step.FINISHED:
        assert all(ended_well(item) for item in states)


def test_the_first_failure_is_the_cause_and_not_the_cascade() -> None:
    states = {
        "a": state(Phase.KILLED, None, stop_reason="b failed", ended_at=5.0),
        "b": state(Phase.EXITED, 1, ended_at=9.0),
        "c": state(Phase.EXITED, 0, ended_at=1.0),
    }
    found = first_failure(states)
    assert found is not None
    assert found[0] == "b"
    assert describe_end(*found) == "b: exit status 1"
    assert first_failure({"c": DONE}) is None


@pytest.mark.parametrize(("reason", "number"), [(cancel_reason(3), 3), ("requested", None), (None, None), ("", None)])
def test_cancel_reasons(reason: str | None, number: int | None) -> None:
    assert cancelled_try(reason) == number


@given(st.binary(max_size=400), st.lists(st.integers(1, 50), max_size=30))
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, cuts: list[int]) -> None:
    whole, cut = LogCursor(), LogCursor()
    expected = whole.feed(data) + whole.flush()
    lines = []
    position = 0
    for size in [*cuts, len(data)]:
        assert cut.read_offset == position
        lines += cut.feed(data[position : position + size])
        position = min(position + size, len(data))
    assert lines + cut.flush() == expected
    assert cut.offset == whole.offset == len(data)


@given(st.binary(max_size=400), st.integers(0, 400))
def test_another_cursor_goes_on_without_losing_or_repeating(data: bytes, at: int) -> None:
    whole = LogCursor()
    expected = whole.feed(data) + whole.flush()
    first = LogCursor()
    lines = first.feed(data[:at])
    second = LogCursor(first.offset)
    lines += second.feed(data[second.read_offset :]) + second.flush()
    assert lines == expected


def test_progress_bars_fold_to_their_last_state() -> None:
    cursor = LogCursor()
    assert cursor.feed("训练\r 10%\r 20%\n好\r\n\xff".encode()[:-2] + b"\xff\n") == [" 20%", "好", "\ufffd"]
