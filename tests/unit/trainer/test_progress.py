"""Step lines as ms-swift and Megatron write them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.progress import ProgressReader, merge, parse_duration, parse_row

STEP = (
    '{"loss": 6.34, "grad_norm": 3.09, "learning_rate": 9.83e-06, "token_acc": 0.0, "epoch": 0.04, '
    '"global_step/max_steps": "1/12", "elapsed_time": "1s", "remaining_time": "1h 2m 3s", "train_speed(s/it)": 0.52}'
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45s", 45),
        ("1h 2m 3s", 3723),
        ("1d 2h", 93600),
        ("0s", 0),
        ("1.5s", 1.5),
        ("", None),
        ("soon", None),
        (3, None),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


def test_a_step_line_of_ms_swift():
    row = parse_row(STEP)
    assert (row.step, row.max_steps, row.epoch, row.loss, row.grad_norm) == (1, 12, 0.04, 6.34, 3.09)
    assert (row.learning_rate, row.elapsed_s, row.remaining_s, row.seconds_per_step) == (9.83e-06, 1, 3723, 0.52)


def test_a_step_line_of_megatron():
    row = parse_row('{"iteration": "10/1000", "loss": 2.5, "learning_rate": 1e-5, "elapsed_time": "2m 1s"}')
    assert (row.step, row.max_steps, row.loss, row.elapsed_s) == (10, 1000, 2.5, 121)


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", '{"train_runtime": 5.0}', '{"global_step": 12, "log_history": []}', '{"global_step/max_steps": 3}'],
)
def test_other_lines_are_no_step_lines(line):
    assert parse_row(line) is None


def test_values_that_are_no_numbers_are_left_out():
    row = parse_row('{"iteration": "1/2", "loss": NaN, "grad_norm": Infinity, "learning_rate": "x", "epoch": true}')
    assert (row.loss, row.grad_norm, row.learning_rate, row.epoch) == (None, None, None, None)


def test_an_eval_line_keeps_the_loss_of_the_step_line():
    merged = merge(parse_row(STEP), parse_row('{"eval_loss": 1.25, "global_step/max_steps": "2/12"}'))
    assert (merged.step, merged.loss, merged.eval_loss) == (2, 6.34, 1.25)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30), st.lists(st.integers(1, 40), max_size=60))
def test_any_cutting_of_the_stream_gives_the_last_row(tmp_path_factory, steps, cuts):
    path = tmp_path_factory.mktemp("progress") / "logging.jsonl"
    data = "".join(
        json.dumps({"global_step/max_steps": f"{step}/9", "text": "进度\r"}) + "\n" for step in steps
    ).encode()
    reader = ProgressReader(str(path))
    with path.open("wb", buffering=0) as stream:
        for cut in cuts:
            stream.write(data[:cut])
            data = data[cut:]
            reader.poll()
        stream.write(data)
    assert reader.poll().step == steps[-1]


def test_a_resumed_run_shows_its_own_rows_only(tmp_path):
    path = tmp_path / "logging.jsonl"
    path.write_text(STEP.replace("1/12", "9/12") + "\n")
    reader = ProgressReader(str(path))
    assert reader.poll() is None
    with path.open("a") as stream:
        stream.write(STEP.replace("1/12", "5/12") + "\n")
    assert reader.poll().step == 5


def test_a_replaced_file_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "logging.jsonl"
    path.write_text(STEP + "\n" + STEP + "\n")
    reader = ProgressReader(str(path))
    path.write_text(STEP.replace("1/12", "3/12") + "\n")
    assert reader.poll().step == 3
