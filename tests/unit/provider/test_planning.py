"""Recipe + cluster + parameters → launch plan → jobs: what runs where, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_provider.config import Cluster, ConfigError, Recipe
from swift_provider.planning.inputs import resolve_inputs, split_inputs
from swift_provider.planning.launch import Resume, job_spec
from swift_provider.planning.names import job_id, run_key, safe_name
from swift_provider.planning.plan import LaunchPlan
from swift_provider.planning.planner import make_plan
from trainer.protocol import Owner

CONFIGS = Path(__file__).resolve().parents[3] / "include" / "configs"


def recipe(**args: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "r",
            "cluster": "c",
            "swift": {"args": {"model": "org/model", "dataset": ["/data/a.jsonl#50", "oss://bucket/b.jsonl"], **args}},
            "checkpoints": {"backup": "oss://bucket/ckpt"},
        }
    )


def cluster(nodes: int = 2, slots: int = 4, **more: Any) -> Cluster:
    items = [
        {"name": f"n{i}", "ssh_conn_id": f"ssh{i}", "address": f"10.0.0.{i}", "slots": slots} for i in range(nodes)
    ]
    return Cluster.model_validate({"name": "c", "python": "/env/bin/python", "nodes": items, **more})


def plan(r: Recipe | None = None, c: Cluster | None = None, **params: Any) -> LaunchPlan:
    return make_plan(r or recipe(), c or cluster(), dag_id="dag", run_id="run", params=params, config_dir=CONFIGS)


def refusal(r: Recipe | None = None, c: Cluster | None = None, **params: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(r, c, **params)
    return str(caught.value)


def test_the_same_recipe_grows_with_the_cluster() -> None:
    one, many = plan(c=cluster(1, 1)), plan(c=cluster(4, 8))
    assert (one.world_size, many.world_size) == (1, 32)
    assert one.micro_batch * one.accumulation * one.world_size == one.global_batch == 16
    assert many.global_batch == 32
    assert "MASTER_ADDR" not in job_spec(one, one.nodes[0], job_id="j", owner=Owner(), staged={}).env


def test_what_each_node_runs() -> None:
    p = plan(c=cluster(2, 4, shared_dir="/shared", workdir="/w"), r=recipe(deepspeed="zero3.json"))
    staged = {"/data/a.jsonl": "/cache/a", "oss://bucket/b.jsonl": "/cache/b"}
    spec = job_spec(
        p, p.nodes[1], job_id="j1", owner=Owner(), staged=staged, resume=Resume("checkpoint-7", 7, {"a": "b"})
    )
    assert spec.argv == ["/env/bin/python", "-m", "swift.cli.main", "sft", "/w/jobs/j1/swift.yaml"]
    assert {
        name: spec.env[name] for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")
    } == {
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.0",
        "MASTER_PORT": "29500",
        "NPROC_PER_NODE": "4",
    }
    args = yaml.safe_load(spec.files["swift.yaml"])
    assert args["dataset"] == ["/cache/a#50", "/cache/b"]
    assert args["deepspeed"] == "/w/jobs/j1/deepspeed.json"
    assert json.loads(spec.files["deepspeed.json"])["zero_optimization"]["stage"] == 3
    assert args["output_dir"] == spec.output_dir == "/shared/runs/dag.run/output"
    assert args["resume_from_checkpoint"] == "/shared/runs/dag.run/output/checkpoint-7"
    assert spec.resume_files == {"a": "b"}
    assert (spec.port, job_spec(p, p.nodes[0], job_id="j", owner=Owner(), staged={}).port) == (None, 29500)
    assert args["add_version"] is False
    assert args["save_on_each_node"] is False
    assert args["ddp_timeout"] == 1800


def test_without_a_shared_disk_every_node_saves() -> None:
    assert plan().args["save_on_each_node"] is True
    assert plan(c=cluster(1)).args["save_on_each_node"] is False


def test_a_cpu_cluster_makes_one_world() -> None:
    p = plan(c=cluster(2, 1, device="cpu"), r=recipe(deepspeed="zero3", external_plugins="/mine.py"))
    assert p.args["use_cpu"] is True
    assert p.args["torch_dtype"] == "bfloat16"
    assert p.args["external_plugins"] == ["{job_dir}/cpu_process_group.py", "/mine.py"]
    assert p.env["DS_ACCELERATOR"] == "cpu"
    spec = job_spec(p, p.nodes[0], job_id="j", owner=Owner(), staged={})
    assert "init_distributed" in spec.files["cpu_process_group.py"]


def test_params_of_a_run_win_over_the_recipe() -> None:
    p = plan(
        r=recipe(max_steps=100), max_steps=5, learning_rate=None, nodes=["n1"], keep_last=7, extra_args={"seed": 1}
    )
    assert (p.args["max_steps"], p.args["seed"], p.checkpoints.keep_last) == (5, 1, 7)
    assert "learning_rate" not in p.args
    assert [node.name for node in p.nodes] == ["n1"]
    assert plan(dataset=["/other.jsonl"]).inputs == ["/other.jsonl"]


def test_every_refusal_at_once() -> None:
    text = refusal(
        r=recipe(deepspeed="zeroo.json", fsdp="fsdp2", per_device_train_batch_size=0),
        c=cluster(2, 1, device="cpu"),
        lerning_rate=1,
        nodes=["nn1"],
        extra_args={"output_dir": "/x"},
    )
    for expected in (
        "unknown parameter (value 1); did you mean 'learning_rate'?",
        "no node 'nn1'; did you mean 'n1'?",
        "extra_args.output_dir: leave it out",
        "there are: zero2.json, zero3.json",
        "excludes deepspeed",
        "does not work on a CPU cluster",
        "must be a whole number from 1 on (got 0)",
    ):
        assert expected in text


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", None])
def test_ranks_must_be_able_to_meet(address: str | None) -> None:
    items = [
        {"name": "a", "ssh_conn_id": "a", "address": address},
        {"name": "b", "ssh_conn_id": "b", "address": "10.0.0.2"},
    ]
    assert "node a" in refusal(c=Cluster.model_validate({"name": "c", "python": "/p", "nodes": items}))


def test_uneven_slots_are_refused() -> None:
    items = [
        {"name": "a", "ssh_conn_id": "a", "address": "h1", "slots": 8},
        {"name": "b", "ssh_conn_id": "b", "address": "h2", "slots": 4},
    ]
    assert "same number on each" in refusal(c=Cluster.model_validate({"name": "c", "python": "/p", "nodes": items}))


def test_the_plan_is_a_value() -> None:
    p = plan()
    assert LaunchPlan.model_validate(json.loads(json.dumps(p.model_dump(mode="json")))) == p
    assert "world size 8 = n0:4 + n1:4" in p.describe()


names = st.text(min_size=1, max_size=60)


@given(names, names, names, names)
def test_names_are_pure_distinct_and_harmless(dag: str, run: str, other_dag: str, other_run: str) -> None:
    first, second = job_id(dag, run, "train", -1, 1), job_id(other_dag, other_run, "train", -1, 1)
    assert (first == second) == ((dag, run) == (other_dag, other_run))
    assert first == job_id(dag, run, "train", -1, 1)
    for name in (first, run_key(dag, run), safe_name(run)):
        assert "/" not in name
        assert not name.startswith(("-", "."))
        assert name.isascii()
        assert len(name) <= 160


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 64), st.one_of(st.none(), st.integers(1, 64)))
@settings(max_examples=60)
def test_the_arithmetic_adds_up(nodes: int, slots: int, micro: int, accumulation: int | None) -> None:
    r = recipe(per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation)
    p = plan(r=r, c=cluster(nodes, slots))
    assert p.world_size == nodes * slots == sum(node.slots for node in p.nodes)
    assert p.global_batch == p.micro_batch * p.accumulation * p.world_size
    assert [node.rank for node in p.nodes] == list(range(nodes))


def test_inputs_and_hub_ids() -> None:
    args = {"model": "oss://b/m/", "dataset": ["/d.jsonl#10", "org/set:default#5"], "adapters": "/a"}
    assert split_inputs(args) == (["oss://b/m/", "/a", "/d.jsonl"], ["org/set:default#5"])
    moved = resolve_inputs(args, {"oss://b/m/": "/c/m", "/d.jsonl": "/c/d"})
    assert moved == {"model": "/c/m", "dataset": ["/c/d#10", "org/set:default#5"], "adapters": "/a"}
