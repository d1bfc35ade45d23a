"""Recipes for every way of training that runs without a GPU: one recipe's words, and the clusters that they grow on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from local.laptop import Laptop
from local.processes import free_port
from local.tiny_model import make_rows
from trainer.store import open_bucket

STEPS, SAVE_STEPS = 8, 4
#: What every recipe says; the rest is the engine's.
COMMON: dict[str, Any] = {
    "model": "oss://swift-demo/models/tiny-qwen2/",
    "model_type": "qwen2",
    "template": "chatml",
    "torch_dtype": "bfloat16",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0.001,
    "max_length": 128,
    "max_steps": STEPS,
    "save_steps": SAVE_STEPS,
    "eval_strategy": "no",
    "logging_steps": 1,
    "seed": 7,
    "dataset_num_proc": 1,
    "dataloader_num_workers": 0,
    "report_to": ["tensorboard"],
}
SUMS = ["oss://swift-demo/datasets/sums.jsonl"]
LORA = {"tuner_type": "lora", "lora_rank": 4, "target_modules": ["all-linear"]}
#: Name → cluster, ms-swift command, and the arguments that make the difference.
ENGINES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "single-pt-lora": ("one-process", "pt", {"dataset": ["oss://swift-demo/datasets/texts.jsonl"], **LORA}),
    "ddp-lora": ("two-processes", "sft", {"dataset": SUMS, **LORA}),
    "zero2-full": ("two-processes", "sft", {"dataset": SUMS, "tuner_type": "full", "deepspeed": "zero2"}),
    "zero3-dpo-full": (
        "two-processes",
        "rlhf",
        {
            "dataset": ["oss://swift-demo/datasets/pairs.jsonl"],
            "rlhf_type": "dpo",
            "tuner_type": "full",
            "deepspeed": "own-zero3.json",
        },
    ),
}


def write_engine_configs(folder: Path, configs: Path) -> None:
    """Adds the recipes, the two clusters that they train on, and DeepSpeed settings of the user's own."""
    local = yaml.safe_load((configs / "clusters" / "local.yaml").read_text())
    del local["shared_dir"]
    for name, count in (("one-process", 1), ("two-processes", 2)):
        nodes = [{**node, "workdir": str(folder / "nodes" / node["name"] / name)} for node in local["nodes"][:count]]
        cluster = {**local, "name": name, "nodes": nodes, "master_port": free_port("127.0.0.11")}
        (configs / "clusters" / f"{name}.yaml").write_text(yaml.safe_dump(cluster))
    own = json.loads((configs / "deepspeed" / "zero3.json").read_text())
    own["zero_optimization"]["sub_group_size"] = 12345678
    (configs / "deepspeed" / "own-zero3.json").write_text(json.dumps(own))
    for name, (cluster_name, command, args) in ENGINES.items():
        recipe = {
            "name": name,
            "swift": {"command": command, "args": {**COMMON, **args}},
            "cluster": cluster_name,
            "checkpoints": {"backup": f"oss://swift-demo/{name}", "keep_last": 2},
        }
        (configs / "recipes" / f"{name}.yaml").write_text(yaml.safe_dump(recipe))


def put_datasets(laptop: Laptop) -> None:
    """Rows for pretraining and for preferences, made of the same sums."""
    rows: list[dict[str, Any]] = make_rows(200, seed=3)
    texts, pairs = [], []
    for row in rows:
        question, answer = row["messages"]
        text = f"{question['content']} {answer['content']}"
        texts.append({"messages": [{"role": "assistant", "content": text}]})
        pairs.append({**row, "rejected_response": "I do not know."})
    bucket = open_bucket(laptop.oss_target())
    for name, made in (("texts", texts), ("pairs", pairs)):
        bucket.put_object(f"datasets/{name}.jsonl", "".join(json.dumps(row) + "\n" for row in made))
