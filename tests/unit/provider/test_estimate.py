"""Memory by engine, tuner and type, against the arithmetic of the papers and published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_provider.planning.checks import OK, WARN, NodeFacts, check_nodes
from swift_provider.planning.estimate import checkpoint_bytes, estimate, fits, judge, steps
from swift_provider.planning.plan import LaunchPlan, MemoryEstimate
from swift_provider.planning.planner import make_plan
from swift_provider.planning.shape import shape_of
from tests.unit.provider.configs import LLAMA31_8B, PARAMETERS, QWEN3_30B_A3B, QWEN25_7B
from tests.unit.provider.test_engines import megatron, recipe
from tests.unit.provider.test_planning import CONFIGS, cluster, plan
from trainer.protocol import Gpu, ProbeReply

GIB = 2**30
A100 = 80 * GIB
PARAMS_7B = 7_615_616_512


def memory(p: LaunchPlan, config: Any = QWEN25_7B) -> MemoryEstimate:
    found = estimate(p, config)
    assert found is not None
    return found


def full(nodes: int = 1, slots: int = 8, **args: Any) -> LaunchPlan:
    return plan(recipe("sft", tuner_type="full", torch_dtype="bfloat16", **args), cluster(nodes, slots))


@pytest.mark.parametrize(("config", "parameters"), PARAMETERS)
def test_published_parameters(config: dict[str, Any], parameters: int) -> None:
    shape = shape_of(config)
    assert shape is not None
    assert shape.exact
    assert shape.parameters == parameters


def test_configs_that_say_too_little() -> None:
    assert shape_of({}) is None
    assert shape_of({"hidden_size": "big", "num_hidden_layers": 1, "num_attention_heads": 1}) is None
    nested = shape_of({"text_config": QWEN25_7B, "vision_config": {}})
    assert nested is not None
    assert not nested.exact


@pytest.mark.parametrize(
    ("args", "weights", "gradients", "optimizer"),
    [
        ({}, 2, 2, 4),  # plain AdamW on bfloat16 weights
        ({"deepspeed": "zero1"}, 2, 2, 12 / 8),  # the table of the ZeRO paper, on eight ranks
        ({"deepspeed": "zero2"}, 2, 2 / 8, 12 / 8),
        ({"deepspeed": "zero3"}, 2 / 8, 2 / 8, 12 / 8),
        ({"deepspeed": "zero3.json"}, 2 / 8, 2 / 8, 12 / 8),
        ({"deepspeed": "zero2_offload"}, 2, 2 / 8, 0),
        ({"fsdp": "fsdp2"}, 4 / 8, 4 / 8, 8 / 8),
    ],
)
def test_bytes_per_parameter(args: dict[str, Any], weights: float, gradients: float, optimizer: float) -> None:
    found = memory(full(**args))
    per_parameter = [size / PARAMS_7B for size in (found.weights, found.gradients, found.optimizer)]
    assert per_parameter == pytest.approx([weights, gradients, optimizer], rel=1e-6)


def test_megatron_shares_out() -> None:
    one = memory(plan(megatron(global_batch_size=64), cluster(1, 8)))
    assert one.weights / PARAMS_7B == pytest.approx(2, rel=1e-6)
    assert one.gradients / PARAMS_7B == pytest.approx(4, rel=1e-6)
    assert one.optimizer / PARAMS_7B == pytest.approx(12 / 8, rel=1e-6)
    split = plan(megatron(global_batch_size=64, tensor_model_parallel_size=4), cluster(1, 8))
    assert memory(split).weights == pytest.approx(one.weights / 4, rel=0.01)
    # 128 experts hold 29 of the 30.5 billion parameters: eight ranks of experts leave 3.6 and the rest.
    experts = plan(megatron(expert_model_parallel_size=8), cluster(1, 8))
    assert memory(experts, QWEN3_30B_A3B).weights / 2 == pytest.approx(5.2e9, rel=0.05)


def test_a_lora_trains_little() -> None:
    p = plan(recipe("sft", torch_dtype="bfloat16", lora_rank=8), cluster(1, 1))
    found = memory(p)
    assert found.weights == pytest.approx(2 * PARAMS_7B, rel=0.01)
    # peft reports 20,185,088 trainable parameters for rank 8 on all linear layers of this model.
    shape = shape_of(QWEN25_7B)
    assert shape is not None
    assert shape.lora_parameters(8) == 20_185_088
    assert found.optimizer == 8 * 20_185_088
    quantized = plan(recipe("sft", torch_dtype="bfloat16", quant_bits=4), cluster(1, 1))
    assert memory(quantized).weights < 0.3 * found.weights


def test_preferences_need_a_reference_and_pairs() -> None:
    def of(command: str, **args: Any) -> MemoryEstimate:
        return memory(plan(recipe(command, torch_dtype="bfloat16", deepspeed="zero3", **args), cluster(1, 8)))

    plain, dpo = of("sft", tuner_type="full"), of("rlhf", tuner_type="full", rlhf_type="dpo")
    assert dpo.weights == pytest.approx(2 * plain.weights, rel=1e-6)
    assert dpo.activations == 2 * plain.activations
    assert of("rlhf", tuner_type="lora").weights == of("sft", tuner_type="lora").weights


def test_activations_of_the_paper() -> None:
    """34sbh with selective recomputation; a gated MLP of width 2h keeps as much as a plain one of 4h."""
    config = {**LLAMA31_8B, "num_hidden_layers": 1, "vocab_size": 1, "intermediate_size": 2 * 4096}
    args = {"micro_batch_size": 1, "global_batch_size": 8, "max_length": 1000}
    found = memory(plan(megatron(**args), cluster(1, 8)), config)
    assert found.activations == pytest.approx(1000 * 4096 * 34, rel=1e-4)
    less = memory(
        plan(megatron(**args, recompute_granularity="full"), cluster(1, 8)), {**config, "num_hidden_layers": 100}
    )
    assert less.activations == pytest.approx(1000 * 4096 * (2 * 100 + 34), rel=1e-5)


def test_a_7b_model_on_known_hardware() -> None:
    verdict = fits(full(1, 1, gradient_accumulation_steps=1, deepspeed="zero2", max_length=2048), QWEN25_7B, A100)
    assert verdict is not None
    assert not verdict.fits
    assert "tuner_type: lora" in verdict.advice
    zero3 = fits(full(2, 8, deepspeed="zero3.json", max_length=4096), QWEN25_7B, A100)
    assert zero3 is not None
    assert zero3.fits
    zero2 = full(1, 4, deepspeed="zero2", max_length=2048)
    tight = fits(zero2, QWEN25_7B, 40 * GIB)
    assert tight is not None
    assert not tight.fits
    assert tight.advice.startswith("deepspeed: zero3 (about ")


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert estimate(full(deepspeed="/on/the/node.json"), QWEN25_7B) is None
    assert fits(full(), {}, A100) is None
    assert estimate(plan(recipe("sft"), cluster(2, 1, device="cpu")), QWEN25_7B) is None
    assert plan().memory is None


@given(
    st.sampled_from([{}, {"deepspeed": "zero2"}, {"deepspeed": "zero3"}, {"fsdp": "fsdp2"}]),
    st.sampled_from(["full", "lora"]),
    st.integers(1, 8),
    st.integers(64, 8192),
)
def test_more_samples_never_need_less_and_advice_helps(
    engine: dict[str, Any], tuner: str, micro: int, length: int
) -> None:
    def of(size: int) -> MemoryEstimate:
        args = {**engine, "tuner_type": tuner, "max_length": length, "torch_dtype": "bfloat16"}
        return memory(plan(recipe("sft", per_device_train_batch_size=size, **args), cluster(1, 8)))

    found = of(micro)
    assert found.total <= of(micro + 1).total
    assert all(total < found.total for total in found.alternatives.values())
    assert judge(found, found.total * 2).fits
    assert not judge(found, found.total // 2).fits


def test_steps_and_checkpoints() -> None:
    assert steps(1000, 16, 1) == 62
    assert steps(3, 16, 2) == 2
    assert checkpoint_bytes(full(deepspeed="zero3"), QWEN25_7B) == 14 * PARAMS_7B
    assert checkpoint_bytes(full(deepspeed="zero3", save_only_model=True), QWEN25_7B) == 2 * PARAMS_7B
    lora = plan(recipe("sft", torch_dtype="bfloat16"), cluster(1, 1))
    assert checkpoint_bytes(lora, QWEN25_7B) == (4 + 8) * 20_185_088


def test_the_plan_carries_it_to_preflight() -> None:
    values = {"dag_id": "d", "run_id": "r", "config_dir": CONFIGS, "model_config": QWEN25_7B}
    p = make_plan(recipe("sft", tuner_type="full", deepspeed="zero2", max_length=2048), cluster(1, 1), **values)
    assert "memory about " in p.describe()
    assert LaunchPlan.model_validate(json.loads(json.dumps(p.model_dump(mode="json")))) == p
    for size, level in ((A100, WARN), (10 * A100, OK)):
        gpus = [Gpu(index=0, name="A100", memory_total=size, memory_used=0)]
        facts = {"n0": NodeFacts(probe=ProbeReply("h", "3.11", "/python", gpus=gpus))}
        found = [check for check in check_nodes(p, facts, {}) if check.name == "gpu memory"]
        assert [check.level for check in found] == [level]


def test_the_shipped_recipes_fit_what_they_name() -> None:
    from swift_provider.config import load_cluster, load_recipe

    for name in ("qwen2.5-7b-full-zero3-2nodes", "qwen2.5-7b-lora-zero2-1node", "qwen2.5-7b-lora-1gpu"):
        found = load_recipe(name, Path(CONFIGS))
        hosts = {"gpu_node1": "10.0.0.1", "gpu_node2": "10.0.0.2"}
        where = load_cluster(found.cluster, Path(CONFIGS))
        p = make_plan(found, where, dag_id="d", run_id="r", hosts=hosts, config_dir=CONFIGS, model_config=QWEN25_7B)
        assert p.memory is not None
        assert judge(p.memory, A100).fits, f"{name}: {p.memory}"
