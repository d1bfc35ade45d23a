"""Steps, tokens, disk, hours and money: with the arithmetic where it is known, plainly unknown where it is not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_provider.config import Cluster, Recipe
from swift_provider.planning.forecast import Forecast, comparable, forecast
from swift_provider.planning.plan import LaunchPlan
from tests.unit.provider.configs import QWEN25_7B
from tests.unit.provider.test_engines import megatron, recipe
from tests.unit.provider.test_estimate import PARAMS_7B
from tests.unit.provider.test_planning import cluster, plan

FULL = {"tuner_type": "full", "deepspeed": "zero3", "torch_dtype": "bfloat16", "max_length": 2048}
GIB = 2**30


def told(r: Recipe, where: Cluster, config: Any = QWEN25_7B, last: Any = None) -> tuple[LaunchPlan, Forecast]:
    made = plan(r, where)
    return made, forecast(made, r, where, config, last)


def with_speed(r: Recipe, seconds: float) -> Recipe:
    return r.model_copy(update={"seconds_per_step": seconds})


def test_everything_is_known_and_shown_with_its_arithmetic() -> None:
    r = with_speed(recipe("sft", **FULL, max_steps=1000, save_steps=300), 3.6)
    _, found = told(r, cluster(2, 8, shared_dir="/s", price_per_hour=100, currency="CNY"))
    assert (found.steps, found.checkpoints, found.seconds) == (1000, 4, 3600)
    assert found.tokens == 1000 * 16 * 2048
    assert found.checkpoint_bytes == 14 * PARAMS_7B
    assert found.disk_bytes == 4 * 14 * PARAMS_7B
    assert found.cost == pytest.approx(200)
    assert found.lines == [
        "steps 1,000 (max_steps) = 16,000 samples = at most 32,768,000 tokens (max_length 2048)",
        "checkpoint 99.3 GiB; 4 until prune (every 300 steps) = 397.2 GiB on the shared disk",
        "hours 1.00 = 1,000 steps x 3.6 s (seconds_per_step of the recipe)",
        "cost 200.00 CNY = 2 nodes x 100 CNY/h x 1.00 h",
    ]


def test_what_is_not_known_is_called_unknown() -> None:
    _, found = told(recipe("sft"), cluster(2, 8), config=None)
    assert [line.partition(":")[0] for line in found.lines] == [
        "steps unknown",
        "checkpoint size unknown",
        "hours unknown",
        "cost unknown",
    ]
    assert (found.steps, found.disk_bytes, found.seconds, found.cost) == (None, None, None, None)
    _, found = told(with_speed(recipe("sft"), 2), cluster(1, 1, price_per_hour=1))
    assert "hours unknown: 2 s per step (seconds_per_step of the recipe), but how many steps is unknown" in found.lines
    assert "cost unknown: 1 nodes x 1 CNY/h, but how many hours is unknown" in found.lines


def test_nodes_without_a_shared_disk_hold_the_weights_and_their_own_shards() -> None:
    _, found = told(recipe("sft", **FULL, max_steps=10, save_steps=10), cluster(2, 8))
    assert found.disk_bytes == (2 + 12 / 2) * PARAMS_7B
    _, found = told(recipe("sft", tuner_type="full", max_steps=10, save_steps=10), cluster(2, 8))
    assert found.disk_bytes == found.checkpoint_bytes, "plain DDP: each node writes all of it"


def test_a_good_run_of_the_same_recipe_tells_speed_and_steps() -> None:
    r, where = recipe("sft"), cluster(2, 4)
    result = {"recipe": "r", "world_size": 8, "global_batch": 16, "seconds_per_step": 2.5, "steps_of_data": 720}
    made, found = told(r, where, last=result)
    assert comparable(result, made) == result
    assert (found.steps, found.seconds) == (720, 1800)
    assert "hours 0.50 = 720 steps x 2.5 s (measured in the last good run)" in found.lines
    _, found = told(with_speed(r, 5), where, last=result)
    assert found.seconds == 3600, "what the recipe says wins"
    for change in ({"world_size": 4}, {"recipe": "other"}, {"global_batch": 32}, {"seconds_per_step": None}):
        assert comparable({**result, **change}, made) is None
    for odd in (None, [], "x", {}, {"seconds_per_step": 0, "recipe": "r", "world_size": 8, "global_batch": 16}):
        assert comparable(odd, made) is None


def test_megatron_counts_iterations() -> None:
    r = megatron(num_train_epochs=None, train_iters=50, global_batch_size=64, max_length=1024)
    _, found = told(r, cluster(1, 8))
    assert (found.steps, found.tokens) == (50, 50 * 64 * 1024)
    assert found.lines[0].startswith("steps 50 (train_iters) = 3,200 samples")


@given(st.integers(1, 10**6), st.integers(1, 10**4), st.floats(0.01, 1e4), st.floats(0, 1e4), st.integers(1, 4))
def test_more_of_anything_never_takes_less(steps: int, every: int, speed: float, price: float, nodes: int) -> None:
    def of(steps: int, speed: float) -> Forecast:
        r = with_speed(recipe("sft", **FULL, max_steps=steps, save_steps=every), speed)
        return told(r, cluster(nodes, 8, price_per_hour=price))[1]

    one, more = of(steps, speed), of(steps + 1, speed)
    assert more.seconds > one.seconds
    assert more.cost >= one.cost
    assert more.disk_bytes >= one.disk_bytes
    assert one.checkpoints * every >= steps > (one.checkpoints - 1) * every
    assert of(steps, speed * 2).seconds == pytest.approx(2 * one.seconds)
