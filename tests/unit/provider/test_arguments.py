"""Every argument of a recipe against those of the pinned ms-swift, before a GPU is held."""

from __future__ import annotations

from typing import Any

import pytest

from local import envs
from swift_provider.config import ConfigError, Recipe
from swift_provider.planning.arguments import check_arguments
from swift_provider.planning.catalogue import PINNED_VERSION, arguments_of
from swift_provider.planning.renames import MEGATRON, SWIFT, explain
from trainer.swift_arguments import COMMANDS, extract, version

SFT = arguments_of("sft")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("learning_ratee", 1, "did you mean 'learning_rate'?"),
        ("save_strat", "steps", "write the whole name: save_strategy"),
        ("train_type", "lora", "is called tuner_type since"),
        ("max_packed_length", 4096, "packing_length"),
        ("use_flash_attn", True, "attn_impl: flash_attn"),
        ("zzz", 1, "swift sft --help"),
        ("max_steps", "many", "must be a whole number (got 'many')"),
        ("max_steps", 1.5, "must be a whole number"),
        ("learning_rate", "fast", "must be a number"),
        ("gradient_checkpointing", "perhaps", "must be true or false"),
        ("packing", [1], "must be true or false"),
    ],
)
def test_what_is_refused(name: str, value: Any, expected: str) -> None:
    assert expected in check_arguments("sft", {name: value}, SFT)[name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", "1e-4"),
        ("learning_rate", 1e-4),
        ("max_steps", "10"),
        ("packing", "true"),
        ("dataset", ["a", "b"]),
        ("deepspeed", {"zero_optimization": {"stage": 3}}),
        ("model", None),
        ("no_gradient_checkpointing", True),
        ("max-length", 2048),
    ],
)
def test_what_ms_swift_takes_is_taken(name: str, value: Any) -> None:
    assert check_arguments("sft", {name: value}, SFT) == {}


def test_choices() -> None:
    rlhf = arguments_of("rlhf")
    assert check_arguments("rlhf", {"rlhf_type": "dpo"}, rlhf) == {}
    assert "one of dpo, orpo" in check_arguments("rlhf", {"rlhf_type": "pdo"}, rlhf)["rlhf_type"]


def test_commands_differ() -> None:
    assert "rlhf_type" in arguments_of("rlhf")
    assert "rlhf_type" not in SFT
    assert "tensor_model_parallel_size" in arguments_of("megatron sft")
    counts = {command: len(arguments_of(command)) for command in COMMANDS}
    assert counts == {
        "sft": 333,
        "pt": 333,
        "rlhf": 481,
        "export": 127,
        "megatron sft": 414,
        "megatron pt": 414,
        "megatron rlhf": 414,
    }


@pytest.mark.parametrize(("command", "table"), [("sft", SWIFT), ("megatron sft", MEGATRON)])
def test_renames_lead_from_names_that_are_gone_to_names_that_are_there(command: str, table: dict[str, str]) -> None:
    known = arguments_of(command)
    for old, new in table.items():
        assert old not in known, f"{old} is still an argument of {command}"
        if " " not in new:
            assert new in known or new in arguments_of("rlhf"), f"{old}: {command} has no {new}"
        assert explain(command, old)


def test_a_recipe_with_wrong_arguments_is_refused_with_all_of_them() -> None:
    from tests.unit.provider.test_planning import cluster, plan, recipe

    wrong: Recipe = recipe(train_type="lora", lerning_rate=1, max_steps="many")
    with pytest.raises(ConfigError) as caught:
        plan(wrong, cluster())
    assert [fault.key for fault in caught.value.faults] == [
        "swift.args.train_type",
        "swift.args.lerning_rate",
        "swift.args.max_steps",
    ]


def test_the_catalogue_is_that_of_the_pinned_package() -> None:
    folder = envs.env_dir("trainer")
    if not (folder / ".complete").exists():
        pytest.skip("the trainer environment is not built: make setup")
    site_packages = str(next((folder / "lib").glob("python*")) / "site-packages")
    assert version(site_packages) == PINNED_VERSION
    extracted = extract(site_packages)
    for command in COMMANDS:
        assert extracted[command] == arguments_of(command), "run python -m swift_provider.planning.catalogue"
