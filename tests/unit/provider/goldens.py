"""Recipe x cluster → exactly what each node is asked to run. Writes the golden files when run:

python -m tests.unit.provider.goldens
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from swift_provider.config import Cluster, Recipe
from swift_provider.planning.launch import Resume, job_spec
from swift_provider.planning.planner import make_plan
from trainer.protocol import Owner

FOLDER = Path(__file__).parent / "golden"
CONFIGS = Path(__file__).resolve().parents[3] / "include" / "configs"

FULL = {"tuner_type": "full", "torch_dtype": "bfloat16", "max_length": 4096}
LORA = {"tuner_type": "lora", "torch_dtype": "bfloat16", "lora_rank": 8}
MEGATRON = {"torch_dtype": "bfloat16", "num_train_epochs": 1, "micro_batch_size": 1, "global_batch_size": 64}
MOE = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "sequence_parallel": True}

#: name → (command, arguments, nodes, slots, what the cluster says besides)
CASES: dict[str, tuple[str, dict[str, Any], int, int, dict[str, Any]]] = {
    "ddp-lora-1x1": ("sft", LORA, 1, 1, {}),
    "ddp-full-1x8": ("sft", FULL, 1, 8, {}),
    "ddp-lora-2x1-cpu": ("sft", LORA, 2, 1, {"device": "cpu", "shared_dir": "/shared"}),
    "ddp-packing-1x8": ("sft", {**FULL, "packing": True, "attn_impl": "flash_attn"}, 1, 8, {}),
    "ddp-streaming-pt-2x8": ("pt", {**FULL, "streaming": True, "max_steps": 100}, 2, 8, {}),
    "zero2-lora-1x8": ("sft", {**LORA, "deepspeed": "zero2"}, 1, 8, {}),
    "zero2-dpo-2x8": ("rlhf", {**LORA, "deepspeed": "zero2", "rlhf_type": "dpo"}, 2, 8, {}),
    "zero3-own-file-full-2x8": ("sft", {**FULL, "deepspeed": "zero3.json"}, 2, 8, {"shared_dir": "/shared"}),
    "zero3-own-file-full-4x8": ("pt", {**FULL, "deepspeed": "zero3.json"}, 4, 8, {}),
    "zero3-full-2x1-cpu": ("sft", {**FULL, "deepspeed": "zero3"}, 2, 1, {"device": "cpu"}),
    "fsdp2-full-2x8": ("sft", {**FULL, "fsdp": "fsdp2"}, 2, 8, {"shared_dir": "/shared"}),
    "fsdp2-lora-1x8": ("sft", {**LORA, "fsdp": "fsdp2"}, 1, 8, {}),
    "megatron-tp2-full-1x8": ("megatron sft", {**MEGATRON, "tensor_model_parallel_size": 2}, 1, 8, {}),
    "megatron-tp4-pp2-full-2x8": (
        "megatron pt",
        {**MEGATRON, "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2},
        2,
        8,
        {"shared_dir": "/shared"},
    ),
    "megatron-moe-ep4-4x8": ("megatron sft", {**MEGATRON, **MOE}, 4, 8, {"shared_dir": "/shared"}),
    "megatron-lora-dpo-2x8": (
        "megatron rlhf",
        {**MEGATRON, **MOE, "tuner_type": "lora", "rlhf_type": "dpo"},
        2,
        8,
        {"shared_dir": "/shared"},
    ),
}


def render(name: str) -> dict[str, Any]:
    """What one case asks of each node, as plain values: first start, and what a restart changes in its arguments."""
    command, args, nodes, slots, more = CASES[name]
    swift = {"command": command, "args": {"model": "org/model", "dataset": ["/data/train.jsonl"], **args}}
    recipe = Recipe.model_validate({"name": "golden", "cluster": "golden", "swift": swift})
    hosts = [
        {"name": f"n{i}", "ssh_conn_id": f"ssh{i}", "address": f"10.0.0.{i + 1}", "slots": slots} for i in range(nodes)
    ]
    cluster = Cluster.model_validate({"name": "golden", "python": "/env/bin/python", "nodes": hosts, **more})
    plan = make_plan(recipe, cluster, dag_id="dag", run_id="run", config_dir=CONFIGS)
    resume = Resume("checkpoint-100", 100)
    rendered: dict[str, Any] = {"describe": plan.describe().splitlines(), "nodes": {}}
    for node in plan.nodes:
        first = job_spec(plan, node, job_id="g1", owner=Owner(), staged={})
        again = job_spec(plan, node, job_id="g1", owner=Owner(), staged={}, resume=resume)
        before, after = (yaml.safe_load(spec.files["swift.yaml"]) for spec in (first, again))
        rendered["nodes"][node.name] = {
            "argv": first.argv,
            "env": first.env,
            "swift.yaml": before,
            "other files": {file: text for file, text in sorted(first.files.items()) if file != "swift.yaml"},
            "resume adds": {key: value for key, value in after.items() if before.get(key) != value},
        }
    return rendered


def text_of(name: str) -> str:
    """The text of a golden file."""
    return json.dumps(render(name), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for case in CASES:
        (FOLDER / f"{case}.json").write_text(text_of(case), encoding="utf-8")
