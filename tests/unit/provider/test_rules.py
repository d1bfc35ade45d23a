"""Rules about combinations, each with the message that users see; and any cluster with any engine at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_provider.config import Cluster, ConfigError, Fault, Recipe
from swift_provider.planning.engines.parallel import Parallel
from swift_provider.planning.launch import job_spec
from swift_provider.planning.plan import LaunchPlan
from tests.unit.provider.test_engines import engine_args, megatron, megatron_args, recipe, swift_args
from tests.unit.provider.test_planning import cluster, plan
from trainer.protocol import Owner

IN_ARGS = "recipes/r.yaml: swift.args."


@pytest.mark.parametrize(
    ("r", "where", "message"),
    [
        (
            recipe("sft", sequence_parallel_size=3),
            cluster(1, 8),
            "sequence_parallel_size: 8 GPUs cannot be split into groups of 3; choose a divisor of 8 (got 3)",
        ),
        (
            megatron(tensor_model_parallel_size=3),
            cluster(1, 8),
            "tensor_model_parallel_size: 8 GPUs are not divisible by 3 (TP 3 x PP 1 x CP 1); the product must be one of"
            " 1, 2, 4, 8, or change the nodes (got 3)",
        ),
        (
            megatron(global_batch_size=20, tensor_model_parallel_size=2, micro_batch_size=2),
            cluster(1, 8),
            "global_batch_size: must be a multiple of micro_batch_size 2 x data parallel 4 = 8 (world size 8 /"
            " (TP 2 x PP 1 x CP 1)); write 16 or 24 (got 20)",
        ),
        (
            recipe("sft", streaming=True),
            cluster(),
            "max_steps: is needed with streaming: a stream has no length; set the number of optimizer steps (got None)",
        ),
        (
            recipe("sft", packing=True),
            cluster(),
            "attn_impl: packing needs flash attention: write attn_impl: flash_attn, or packing: false (got None)",
        ),
        (
            recipe("sft", fsdp="fsdp2", deepspeed="zero2"),
            cluster(),
            "fsdp: excludes deepspeed; keep one of the two (got 'fsdp2')",
        ),
        (
            recipe("sft", save_only_model=True, resume_from_checkpoint="/c"),
            cluster(),
            "save_only_model: excludes resume_from_checkpoint: what is saved has no optimizer state; drop one of the"
            " two (got true)",
        ),
        (
            megatron(finetune=False, mcore_model="/c", no_save_optim=True),
            cluster(1, 8),
            "no_save_optim: excludes finetune: false: what is saved could not be resumed in turn; leave it out"
            " (got true)",
        ),
        (
            megatron(finetune=False),
            cluster(1, 8),
            "finetune: false goes on from a checkpoint: name it in mcore_model (got false)",
        ),
        (
            recipe("sft", use_cpu=True, fsdp="fsdp2"),
            cluster(),
            "use_cpu: excludes fsdp, which shards over GPUs; leave it out (got True)",
        ),
        (
            recipe("sft", use_cpu=True),
            cluster(),
            "use_cpu: would train on the CPU while the GPUs are held; leave it out, or take a cluster with device: cpu"
            " (got True)",
        ),
        (
            recipe("sft", fsdp="fsdp2"),
            cluster(device="cpu"),
            "fsdp: does not work on a CPU cluster: it would train plain DDP without a word; use deepspeed"
            " (got 'fsdp2')",
        ),
        (
            recipe("sft", ddp_timeout=0),
            cluster(),
            "ddp_timeout: must be seconds from 1 on; leave it out for 1800 (got 0)",
        ),
        (megatron(ddp_timeout=-1), cluster(1, 8), "ddp_timeout: must be seconds from 1 on; leave it out for 1800"),
    ],
)
def test_what_is_refused(r: Recipe, where: Cluster, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(r, where)
    assert len(caught.value.faults) == 1
    assert str(caught.value.faults[0]).startswith(IN_ARGS + message)


@pytest.mark.parametrize(
    ("r", "warning"),
    [
        (
            recipe("sft", ddp_timeout=18_000_000),
            "swift.args.ddp_timeout: a lost peer would hold every GPU for 5,000.0 h; leave it out for 1800 s",
        ),
        (
            recipe("sft", ddp_timeout="60"),
            "swift.args.ddp_timeout: 60 s is less than saving a checkpoint or tokenizing may take; leave it out for"
            " 1800 s",
        ),
        (
            recipe("sft", torch_dtype="float16"),
            "swift.args.torch_dtype: float16 overflows where bfloat16 does not; write torch_dtype: bfloat16 on GPUs"
            " from A100 on",
        ),
        (
            recipe("sft", fp16=True),
            "swift.args.fp16: float16 overflows where bfloat16 does not; write torch_dtype: bfloat16 on GPUs from"
            " A100 on",
        ),
        (
            recipe("sft", save_only_model=True),
            "swift.args.save_only_model: a restart begins anew: what is saved has no optimizer state",
        ),
        (
            recipe("sft", learning_rate="1e-5").model_copy(update={"tuned_global_batch": 64}),
            "tuned_global_batch: learning_rate was tuned for a global batch of 64, and this run has 16; with Adam"
            " 5e-06 would correspond to 1e-05",
        ),
        (
            megatron(global_batch_size=32).model_copy(update={"tuned_global_batch": 64}),
            "tuned_global_batch: lr was tuned for a global batch of 64, and this run has 32; set the accumulation or"
            " the nodes so that they agree",
        ),
    ],
)
def test_what_is_remarked(r: Recipe, warning: str) -> None:
    assert plan(r, cluster(1, 8)).warnings == [warning]


def test_a_batch_as_it_was_tuned_for_is_no_remark() -> None:
    assert plan(recipe("sft").model_copy(update={"tuned_global_batch": 16}), cluster(1, 8)).warnings == []


@pytest.mark.parametrize("name", ["output_dir", "add_version", "save_on_each_node", "save_total_limit"])
def test_what_the_plan_decides_is_refused_in_a_run(name: str) -> None:
    with pytest.raises(ConfigError, match=f"run parameters: extra_args.{name}: leave it out, "):
        plan(recipe("sft"), cluster(), extra_args={name: 1})


@pytest.mark.parametrize(
    ("nodes", "shared_dir", "each"), [(1, None, False), (2, None, True), (2, "/s", False), (3, None, True)]
)
def test_every_node_saves_where_no_disk_is_shared(nodes: int, shared_dir: str | None, each: bool) -> None:
    args = plan(recipe("sft"), cluster(nodes, shared_dir=shared_dir)).args
    assert (args["save_on_each_node"], args["add_version"], args["ddp_timeout"]) == (each, False, 1800)


NAMES = [f"n{number}" for number in range(5)]


@st.composite
def uneven_clusters(draw: st.DrawFn) -> Cluster:
    """Nodes of different sizes, some with some of their GPUs only, some spare, some with a label."""
    nodes: list[dict[str, Any]] = []
    for number, name in enumerate(draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))):
        slots = draw(st.sampled_from([1, 2, 4, 8]))
        node = {"name": name, "ssh_conn_id": name, "address": f"10.0.0.{number}", "slots": slots}
        node["spare"] = number > 0 and draw(st.booleans())
        node["labels"] = draw(st.sampled_from([[], ["rack"]]))
        if draw(st.booleans()):
            node["gpus"] = draw(st.permutations(range(8)))[:slots]
        nodes.append(node)
    device = draw(st.sampled_from(["gpu", "gpu", "cpu"]))
    shared = draw(st.sampled_from([None, "/s"]))
    return Cluster.model_validate({"name": "c", "python": "/p", "nodes": nodes, "device": device, "shared_dir": shared})


entries = st.builds(
    lambda name, slots: name + (":" + ",".join(map(str, slots)) if slots else ""),
    st.sampled_from([*NAMES, "rack", "nobody"]),
    st.lists(st.integers(0, 7), max_size=3, unique=True),
)
selections = st.one_of(st.none(), st.lists(entries, max_size=3))
recipes = st.one_of(
    st.builds(
        lambda command, engine, args: recipe(command, **engine, **args),
        st.sampled_from(["sft", "pt", "rlhf"]),
        engine_args,
        swift_args,
    ),
    st.builds(lambda args: megatron(**args), megatron_args),
)


@given(recipes, uneven_clusters(), selections, selections)
@settings(max_examples=400, deadline=None)
def test_any_cluster_and_any_engine_add_up_or_are_refused(
    r: Recipe, where: Cluster, nodes: list[str] | None, exclude: list[str] | None
) -> None:
    faults: list[Fault] = []
    try:
        made = plan(r, where, nodes=nodes, exclude=exclude)
    except ConfigError as error:
        made, faults = None, error.faults
    if made is not None:
        adds_up(made, where, nodes, exclude)
        return
    assert faults
    assert all(fault.file and fault.problem for fault in faults)
    assert len(set(map(str, faults))) == len(faults), "each fault is said once"


def adds_up(made: LaunchPlan, where: Cluster, nodes: Any, exclude: Any) -> None:
    by_name = {node.name: node for node in where.nodes}
    assert {node.slots for node in made.nodes} == {made.nodes[0].slots}, "torchrun wants as many ranks on each node"
    assert made.world_size == sum(node.slots for node in made.nodes)
    assert made.world_size % made.data_parallel == 0
    assert made.global_batch == made.micro_batch * made.accumulation * made.data_parallel
    if made.engine == "megatron":
        assert made.data_parallel * Parallel.of(made.args).model == made.world_size
    assert [node.rank for node in made.nodes] == list(range(len(made.nodes)))
    for node in made.nodes:
        there = by_name[node.name]
        assert node.slots <= there.slots
        if node.gpus is not None:
            assert len(set(node.gpus)) == node.slots
            assert set(node.gpus) <= set(there.gpus if there.gpus is not None else range(there.slots))
        assert node.name not in (exclude or []), "a node that is excluded as a whole never trains"
        assert nodes or exclude or not there.spare
        spec = job_spec(made, node, job_id="j", owner=Owner(), staged={})
        assert spec.env["NPROC_PER_NODE"] == str(node.slots)
        assert spec.env.get("NNODES", "1") == str(len(made.nodes))
        assert spec.gpus == node.gpus
        assert "{job_dir}" not in spec.files["swift.yaml"]
