"""Engines: golden plans, arithmetic that adds up or one clear refusal, rules, and resume."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_provider.config import Cluster, ConfigError, Fault, Recipe
from swift_provider.planning.checks import required_packages
from swift_provider.planning.engines import ENGINES, Setting, choose
from swift_provider.planning.engines.deepspeed import Zero, zero_of
from swift_provider.planning.engines.parallel import Parallel, check_shape
from swift_provider.planning.launch import Resume, job_spec
from swift_provider.planning.plan import LaunchPlan
from swift_provider.planning.shape import shape_of
from tests.unit.provider.configs import QWEN3_30B_A3B, QWEN25_7B
from tests.unit.provider.goldens import CASES, FOLDER, text_of
from tests.unit.provider.test_planning import cluster, plan
from trainer.protocol import Owner


def recipe(command: str, **args: Any) -> Recipe:
    values = {"model": "org/model", "dataset": ["/d.jsonl"], **args}
    return Recipe.model_validate({"name": "r", "cluster": "c", "swift": {"command": command, "args": values}})


def megatron(**args: Any) -> Recipe:
    return recipe("megatron sft", **{"num_train_epochs": 1, **args})


def faults(r: Recipe, nodes: int = 1, slots: int = 8, **more: Any) -> list[Fault]:
    return plan_or_refusal(r, cluster(nodes, slots, **more))[1]


def plan_or_refusal(r: Recipe, where: Cluster) -> tuple[LaunchPlan | None, list[Fault]]:
    try:
        return plan(r, where), []
    except ConfigError as error:
        return None, error.faults


def made(r: Recipe, nodes: int = 1, slots: int = 8, **more: Any) -> LaunchPlan:
    return plan(r, cluster(nodes, slots, **more))


@pytest.mark.parametrize("name", CASES)
def test_golden_plans(name: str) -> None:
    wanted = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert text_of(name) == wanted, "a plan has changed; if it is meant: python -m tests.unit.provider.goldens"


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES)


sizes = st.sampled_from([1, 2, 3, 4, 8])
engine_args = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"deepspeed": st.sampled_from(["zero2", "zero3", "zero3.json", "zero3_offload"])}),
    st.just({"fsdp": "fsdp2"}),
)
swift_args = st.fixed_dictionaries(
    {},
    optional={
        "per_device_train_batch_size": st.integers(-1, 9),
        "gradient_accumulation_steps": st.integers(0, 9),
        "sequence_parallel_size": sizes,
        "tuner_type": st.sampled_from(["full", "lora"]),
        "packing": st.booleans(),
        "streaming": st.booleans(),
    },
)
megatron_args = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(Parallel.NAMES, sizes),
        "micro_batch_size": st.integers(0, 4),
        "global_batch_size": st.integers(1, 64),
        "sequence_parallel": st.booleans(),
        "streaming": st.booleans(),
        "no_save_optim": st.booleans(),
        "tuner_type": st.sampled_from(["full", "lora"]),
    },
)
clusters = st.tuples(st.integers(1, 4), st.integers(1, 8), st.sampled_from(["gpu", "cpu"]), st.booleans())


def add_up_or_refuse(r: Recipe, where: tuple[int, int, str, bool]) -> None:
    nodes, slots, device, shared = where
    target = cluster(nodes, slots, device=device, shared_dir="/shared" if shared else None)
    p, refusal = plan_or_refusal(r, target)
    if p is None:
        assert refusal
        assert all(fault.key and fault.problem for fault in refusal)
        assert len({(fault.key, fault.problem) for fault in refusal}) == len(refusal)
        return
    assert p.world_size == nodes * slots
    assert p.world_size % p.data_parallel == 0
    assert p.global_batch == p.micro_batch * p.accumulation * p.data_parallel
    if p.engine == "megatron":
        assert p.global_batch == p.args.get("global_batch_size", 16)
        assert p.data_parallel * Parallel.of(p.args).model == p.world_size
    for node in p.nodes:
        spec = job_spec(p, node, job_id="j", owner=Owner(), staged={}, resume=Resume("checkpoint-1", 1))
        text = spec.files["swift.yaml"]
        assert f"{node.output_dir}/checkpoint-1" in text
        assert "{job_dir}" not in text


@given(st.sampled_from(["sft", "pt", "rlhf"]), engine_args, swift_args, clusters)
@settings(max_examples=150, deadline=None)
def test_any_swift_plan_adds_up_or_is_refused(
    command: str, engine: dict[str, Any], args: dict[str, Any], where: tuple[int, int, str, bool]
) -> None:
    add_up_or_refuse(recipe(command, **engine, **args), where)


@given(st.sampled_from(["sft", "pt", "rlhf"]), megatron_args, clusters)
@settings(max_examples=250, deadline=None)
def test_any_megatron_plan_adds_up_or_is_refused(
    command: str, args: dict[str, Any], where: tuple[int, int, str, bool]
) -> None:
    add_up_or_refuse(recipe(f"megatron {command}", num_train_epochs=1, **args), where)


@pytest.mark.parametrize(
    ("args", "key", "words"),
    [
        ({"streaming": True}, "max_steps", "a stream has no length"),
        ({"packing": True}, "attn_impl", "packing needs flash attention"),
        ({"packing": True, "attn_impl": "sdpa"}, "attn_impl", "(got 'sdpa')"),
        ({"padding_free": "true"}, "attn_impl", "padding_free: false"),
        ({"fsdp": "fsdp2", "deepspeed": "zero2"}, "fsdp", "excludes deepspeed"),
        ({"fsdp": "fsdp2", "save_only_model": True}, "save_only_model", "saves shards"),
        ({"save_only_model": True, "resume_from_checkpoint": "/c"}, "save_only_model", "drop one of the two"),
        ({"sequence_parallel_size": 3}, "sequence_parallel_size", "8 GPUs cannot be split into groups of 3"),
        ({"deepspeed": "zero3", "deepspeed_autotp_size": 2, "tuner_type": "full"}, "deepspeed_autotp_size", "stage 3"),
        ({"deepspeed": "zero4"}, "deepspeed", "is none of zero0, zero1"),
        ({"packing": True, "attn_impl": "flash_attn", "lazy_tokenize": True}, "lazy_tokenize", "excludes packing"),
    ],
)
def test_what_swift_refuses(args: dict[str, Any], key: str, words: str) -> None:
    found = faults(recipe("sft", **args))
    assert [fault.key for fault in found] == [f"swift.args.{key}"]
    assert words in found[0].problem
    assert "(got " in found[0].problem


def test_packing_and_the_kinds_of_rlhf() -> None:
    packed = {"packing": True, "attn_impl": "flash_attn"}
    assert faults(recipe("rlhf", rlhf_type="dpo", **packed)) == []
    assert "does not work with rlhf_type orpo" in faults(recipe("rlhf", rlhf_type="orpo", **packed))[0].problem


def test_sequence_parallelism_and_the_kinds_of_rlhf() -> None:
    assert made(recipe("rlhf", rlhf_type="dpo", sequence_parallel_size=2)).data_parallel == 4
    assert "only with grpo, dpo" in faults(recipe("rlhf", rlhf_type="kto", sequence_parallel_size=2))[0].problem


def test_flash_attention_needs_a_gpu() -> None:
    found = faults(recipe("sft", packing=True, attn_impl="flash_attn"), device="cpu")
    assert [fault.key for fault in found] == ["swift.args.attn_impl"]


def test_preflight_asks_for_megatron() -> None:
    assert {"megatron-core", "mcore-bridge"} <= set(required_packages(made(megatron())))
    assert "megatron-core" not in required_packages(made(recipe("sft")))


TP, PP, CP, EP, ETP, VPP = Parallel.NAMES


@pytest.mark.parametrize(
    ("args", "key", "words"),
    [
        ({TP: 3}, TP, "8 GPUs are not divisible by 3 (TP 3 x PP 1 x CP 1)"),
        ({TP: 2, PP: 8}, PP, "by 16 (TP 2 x PP 8 x CP 1); the product must be one of 1, 2, 4, 8"),
        ({EP: 3}, EP, "(ETP 1 x EP 3 x PP 1)"),
        ({"global_batch_size": 12}, "global_batch_size", "micro_batch_size 1 x data parallel 8 = 8"),
        ({"global_batch_size": 12, TP: 8, "micro_batch_size": 5}, "global_batch_size", "write 10 or 15 (got 12)"),
        ({VPP: 2}, VPP, f"needs {PP}"),
        ({PP: 4, VPP: 2, "global_batch_size": 12}, "global_batch_size", "write a multiple of 8"),
        ({"decoder_first_pipeline_num_layers": 5}, "decoder_first_pipeline_num_layers", f"needs {PP}"),
        ({"num_train_epochs": None}, "num_train_epochs", "or train_iters"),
        ({"streaming": True}, "train_iters", "a stream has no length"),
        ({"group_by_length": True}, "group_by_length", "padding_free: false"),
        ({"finetune": False}, "finetune", "name it in mcore_model"),
        ({"finetune": False, "tuner_type": "lora"}, "finetune", "name it in mcore_adapter"),
        ({"finetune": False, "mcore_model": "/c", "no_save_optim": True}, "no_save_optim", "excludes finetune: false"),
        ({"tuner_type": "lora_llm"}, "no_save_optim", "write no_save_optim: true"),
        ({EP: 2, TP: 2}, "sequence_parallel", "only with sequence_parallel: true"),
        ({"tp_comm_overlap": True}, "tp_comm_overlap", "needs sequence_parallel: true"),
        ({"attention_backend": "unfused", "packing": True}, "attention_backend", "flash"),
        ({TP: 0}, TP, "must be a whole number from 1 on"),
    ],
)
def test_what_megatron_refuses(args: dict[str, Any], key: str, words: str) -> None:
    found = faults(megatron(**args))
    assert [fault.key for fault in found] == [f"swift.args.{key}"]
    assert words in found[0].problem
    assert "(got " in found[0].problem


def test_megatron_needs_gpus_and_a_shared_disk() -> None:
    on_cpu = faults(megatron(), device="cpu")
    assert [(fault.key, "GPUs only" in fault.problem) for fault in on_cpu] == [("swift.command", True)]
    apart = faults(megatron(), nodes=2)
    assert [(fault.file, fault.key) for fault in apart] == [("clusters/c.yaml", "shared_dir")]


def test_megatron_packs_without_attn_impl() -> None:
    assert faults(megatron(packing=True)) == []


def test_megatron_fsdp_needs_connections() -> None:
    assert [f.key for f in faults(megatron(use_megatron_fsdp=True))] == ["swift.env.CUDA_DEVICE_MAX_CONNECTIONS"]
    assert faults(megatron(use_megatron_fsdp=True), env={"CUDA_DEVICE_MAX_CONNECTIONS": "32"}) == []


@pytest.mark.parametrize(
    ("parallel", "args", "config", "key"),
    [
        (Parallel(tensor=8), {}, QWEN25_7B, TP),  # 28 heads
        (Parallel(tensor=7), {}, QWEN25_7B, TP),  # 4 key-value heads
        (Parallel(tensor=4, pipeline=4), {}, QWEN25_7B, None),
        (Parallel(pipeline=8), {}, QWEN25_7B, PP),  # 28 layers
        (Parallel(pipeline=4, virtual=2), {}, QWEN25_7B, PP),
        (Parallel(pipeline=4, virtual=7), {}, QWEN25_7B, None),
        (Parallel(pipeline=8), {"decoder_first_pipeline_num_layers": 4, "decoder_last_pipeline_num_layers": 0},
         QWEN25_7B, PP),
        (Parallel(pipeline=3), {"decoder_last_pipeline_num_layers": 8}, QWEN25_7B, None),
        (Parallel(pipeline=8), {"pipeline_model_parallel_layout": "Et|t|L"}, QWEN25_7B, None),
        (Parallel(pipeline=6), {f"account_for_{end}_in_pipeline_split": True for end in ("embedding", "loss")},
         QWEN25_7B, None),
        (Parallel(expert=2), {}, QWEN25_7B, EP),
        (Parallel(expert=8), {}, QWEN3_30B_A3B, None),
        (Parallel(expert=3), {}, QWEN3_30B_A3B, EP),
        (Parallel(tensor=2), {}, QWEN3_30B_A3B, "sequence_parallel"),
        (Parallel(tensor=2), {"sequence_parallel": True}, QWEN3_30B_A3B, None),
    ],
)  # fmt: skip
def test_the_model_must_be_divisible(
    parallel: Parallel, args: dict[str, Any], config: dict[str, Any], key: str | None
) -> None:
    shape = shape_of(config)
    assert shape is not None
    found = check_shape(args, parallel, shape)
    assert [finding.key for finding in found] == ([f"swift.args.{key}"] if key else [])


@pytest.mark.parametrize(
    ("r", "words"),
    [
        (recipe("sft", torch_dtype="float16"), "bfloat16"),
        (recipe("sft", torch_dtype="float32"), "autocast"),
        (recipe("sft", save_only_model=True), "a restart begins anew"),
        (megatron(no_save_optim=True), "a restart begins anew"),
        (megatron(train_iters=10), "num_train_epochs (1) decides"),
        (megatron(fp16=True), "bfloat16"),
    ],
)
def test_what_is_only_remarked(r: Recipe, words: str) -> None:
    p = made(r)
    assert len(p.warnings) == 1
    assert words in p.warnings[0]
    assert f"warning: {p.warnings[0]}" in p.describe()


def test_shards_on_separate_disks_are_remarked() -> None:
    assert "cannot resume" in made(recipe("sft", fsdp="fsdp2"), nodes=2).warnings[0]
    assert made(recipe("sft", fsdp="fsdp2"), nodes=2, shared_dir="/s").warnings == []


def resumed(r: Recipe) -> dict[str, Any]:
    p = made(r)
    spec = job_spec(p, p.nodes[0], job_id="j", owner=Owner(), staged={}, resume=Resume("checkpoint-5", 5))
    args: dict[str, Any] = yaml.safe_load(spec.files["swift.yaml"])
    return args


CHECKPOINT = "/var/lib/swift-trainer/runs/dag.run/output/checkpoint-5"


def test_resume_by_engine() -> None:
    for args in ({}, {"deepspeed": "zero3"}, {"fsdp": "fsdp2"}):
        assert resumed(recipe("sft", **args))["resume_from_checkpoint"] == CHECKPOINT
    full = resumed(megatron(mcore_model="/start", no_load_optim=True, no_load_rng=True))
    assert (full["mcore_model"], full["finetune"], full["model"]) == (CHECKPOINT, False, "org/model")
    assert not {"resume_from_checkpoint", "mcore_adapter", "no_load_optim", "no_load_rng"} & set(full)
    for adapter in ({"tuner_type": "lora"}, {"adapters": ["/start"]}):
        lora = resumed(megatron(mcore_model="/base", **adapter))
        assert (lora["mcore_adapter"], lora["mcore_model"], lora["finetune"]) == (CHECKPOINT, "/base", False)


def test_params_by_command() -> None:
    wanted = {"max_steps": 9, "learning_rate": 0.1, "per_device_train_batch_size": 2, "resume_from": "/old"}
    p = plan(megatron(), cluster(1, 8), **wanted)
    assert {
        name: p.args.get(name) for name in ("train_iters", "lr", "micro_batch_size", "mcore_model", "finetune")
    } == {
        "train_iters": 9,
        "lr": 0.1,
        "micro_batch_size": 2,
        "mcore_model": "/old",
        "finetune": False,
    }
    assert "num_train_epochs" not in p.args
    assert plan(recipe("sft"), cluster(1, 8), **wanted).args["resume_from_checkpoint"] == "/old"
    with pytest.raises(ConfigError, match="it follows from global_batch_size"):
        plan(megatron(), cluster(1, 8), gradient_accumulation_steps=2)


def test_choice() -> None:
    assert [engine.NAME for engine in ENGINES] == ["megatron", "deepspeed", "fsdp", "ddp"]
    assert choose("megatron sft", {"fsdp": "fsdp2"}).NAME == "megatron"
    assert choose("sft", {"fsdp": "fsdp2"}).NAME == "fsdp"
    assert choose("sft", {"deepspeed": None, "fsdp": ""}).NAME == "ddp"


def test_stages() -> None:
    assert zero_of("zero2", {}) == Zero(2)
    assert zero_of("zero2_offload", {}) == Zero(2, True)
    assert zero_of("zero3_offload", {}) == Zero(3, True, True)
    assert zero_of("/on/the/node.json", {}) is None
    assert zero_of({"zero_optimization": {"stage": 1}}, {}) == Zero(1)
    args = {"deepspeed": "zero3.json"}
    assert choose("sft", args).complete(args, Setting("sft"))[0].key == "swift.args.deepspeed"
