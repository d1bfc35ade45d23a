"""What needs GPUs, on real nodes up to torchrun: ms-swift's own command line runs, its call of torchrun is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_provider.config import Cluster, Recipe
from swift_provider.planning.plan import LaunchPlan
from swift_provider.planning.planner import make_plan
from tests.cluster.sites import Site, trainer_python, until
from trainer.protocol import Phase

#: Python reads it at its start; torchrun is the one program that ms-swift's command line starts.
RECORDER = """\
import json, os, subprocess

def run(args, *rest, **more):
    path = os.path.join({folder!r}, os.environ["NODE_RANK"])
    with open(path + ".tmp", "w") as stream:
        json.dump([args, dict(os.environ)], stream)
    os.rename(path + ".tmp", path)
    return subprocess.CompletedProcess(args, 0)

subprocess.run = run
"""
SLOTS = 8
COMMON: dict[str, Any] = {"model": "org/model", "dataset": ["/data/a b.jsonl"], "num_train_epochs": 1}
MOE = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 4,
    "sequence_parallel": True,
    "micro_batch_size": 1,
    "global_batch_size": 16,
}
RECIPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "megatron": ("megatron sft", MOE, "swift/cli/_megatron/sft.py"),
    "megatron-dpo": ("megatron rlhf", {**MOE, "rlhf_type": "dpo"}, "swift/cli/_megatron/rlhf.py"),
    "fsdp2": ("sft", {"fsdp": "fsdp2", "tuner_type": "full"}, "swift/cli/sft.py"),
    "packing": ("pt", {"packing": True, "attn_impl": "flash_attn"}, "swift/cli/pt.py"),
}


def plan_for(site: Site, folder: Path, command: str, args: dict[str, Any]) -> LaunchPlan:
    (folder / "sitecustomize.py").write_text(RECORDER.format(folder=str(folder)))
    cluster = {
        "name": "c",
        "python": str(trainer_python()),
        "nodes": site.cluster_nodes(SLOTS),
        "master_port": site.port,
        "shared_dir": str(folder / "shared"),
        "env": {"PYTHONPATH": str(folder)},
    }
    recipe = {"name": "r", "cluster": "c", "swift": {"command": command, "args": {**COMMON, **args}}}
    return make_plan(Recipe.model_validate(recipe), Cluster.model_validate(cluster), dag_id="dag", run_id="run")


@pytest.mark.parametrize("name", RECIPES)
def test_ms_swift_calls_torchrun_as_the_plan_says(site: Site, tmp_path: Path, name: str) -> None:
    command, args, script = RECIPES[name]
    folder = tmp_path / "seen"
    folder.mkdir()
    plan = plan_for(site, folder, command, args)
    assert plan.world_size == 2 * SLOTS
    job = site.start(plan)
    for rank, node in enumerate(plan.nodes):
        until((folder / str(rank)).exists, 60)
        argv, environment = json.loads((folder / str(rank)).read_text())
        cut = next(index for index, word in enumerate(argv) if word.endswith(".py"))
        assert argv[:3] == [str(trainer_python()), "-m", "torch.distributed.run"]
        assert dict(zip(argv[3:cut:2], argv[4:cut:2], strict=True)) == {
            "--nproc_per_node": str(SLOTS),
            "--nnodes": "2",
            "--node_rank": str(rank),
            "--master_addr": plan.master_address,
            "--master_port": str(site.port),
        }
        assert plan.master_address == site.nodes[0].address
        assert argv[cut].endswith(script)
        told = words_of(argv[cut + 1 :])
        assert told["--output_dir"] == [node.output_dir]
        for key, value in {**COMMON, **args}.items():
            assert told[f"--{key}"] == [str(item) for item in (value if isinstance(value, list) else [value])]
        assert {key: environment[key] for key in plan.env} == plan.env
    for node in plan.nodes:
        until(lambda name=node.name: site.state(name, job).phase == Phase.EXITED)
        assert site.state(node.name, job).exit_code == 0


def words_of(argv: list[str]) -> dict[str, list[str]]:
    """Option → its values."""
    found: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("--"):
            found[word] = []
            last = found[word]
        else:
            last.append(word)
    return found
