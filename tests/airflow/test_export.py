"""A LoRA is trained and merged for real, with ms-swift on CPU; and what keeps a half result from counting."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred

from local import envs
from local.oss_server.serving import RunningServer, running_server
from swift_provider.exceptions import ExportFailed
from swift_provider.operators.export import ExportOperator
from swift_provider.operators.prune import PruneOperator
from swift_provider.planning.plan import LaunchPlan
from tests.airflow.test_train import Task
from tests.cluster.sites import Site, trainer_python
from tests.unit.trainer import layouts
from trainer.protocol import OssCredentials, OssTarget
from trainer.store import find_manifests, verify

SECRET = "local-secret"


class ExportTask(Task):
    """The export task of a run."""

    @property
    def identity(self) -> SimpleNamespace:
        return SimpleNamespace(**{**vars(super().identity), "task_id": "export"})

    @property
    def operator(self) -> ExportOperator:
        return ExportOperator(task_id="export", plan=self.plan.model_dump(mode="json"), poll_interval=0.2)

    def run(self, limit: float = 40.0) -> Any:
        return self.complete(self.follow(self.execute(), limit))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    with running_server(tmp_path / "oss", {"local": SECRET}, buckets=["bucket"]) as server:
        extra = {"access_key_id": "local", "access_key_secret": SECRET, "region": "cn-hangzhou"}
        connection = {"conn_type": "oss", "extra": {**extra, "endpoint": server.endpoint}}
        monkeypatch.setenv("AIRFLOW_CONN_OSS_DEFAULT", json.dumps(connection))
        yield server


def target(server: RunningServer, prefix: str = "ckpt/dag/run") -> OssTarget:
    return OssTarget(server.endpoint, "cn-hangzhou", "bucket", prefix, OssCredentials("local", SECRET))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    command = [str(trainer_python()), "-m", "local.tiny_model", str(folder)]
    subprocess.run(command, check=True, cwd=envs.PROJECT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder


def lora_plan(site: Site, tiny: Path) -> LaunchPlan:
    """Real ms-swift on the first node, in place of the stand-in."""
    plan = site.plan(
        checkpoints={"backup": "oss://bucket/ckpt", "keep_last": 1},
        export={"args": {"merge_lora": True}},
        model=str(tiny / "model"),
        model_type="qwen2",
        template="chatml",
        tuner_type="lora",
        dataset=[f"{tiny / 'sums.jsonl'}#64"],
        model_kwargs=None,
        max_steps=4,
        save_steps=2,
        torch_dtype="bfloat16",
        learning_rate=0.01,
        max_length=128,
        dataloader_num_workers=0,
        report_to=["tensorboard"],
    )
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return plan.model_copy(
        update={"nodes": plan.nodes[:1], "world_size": 1, "data_parallel": 1, "env": {**plan.env, **environment}}
        | {"env": {name: value for name, value in {**plan.env, **environment}.items() if name != "PYTHONPATH"}}
    )


FORWARD = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, merged = sys.argv[1:]
tokens = torch.arange(5, 25).reshape(1, -1)
load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
plain, new = load(base), load(merged)
with torch.no_grad():
    before, after = plain(tokens).logits, new(tokens).logits
    wanted = PeftModel.from_pretrained(plain, adapter)(tokens).logits
print(float((wanted - after).abs().max()), float((before - after).abs().max()))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trained_lora_becomes_a_whole_model_in_the_bucket(site: Site, tiny: Path, server: RunningServer) -> None:
    plan = lora_plan(site, tiny)
    train = Task(plan)
    assert train.complete(train.follow(train.execute(), 240))["step"] == 4

    task = ExportTask(plan)
    result = task.run(240)
    assert (result["checkpoint"], result["node"]) == ("checkpoint-4", "node1")
    assert result["url"] == "oss://bucket/ckpt/dag/run/export-4"
    found = find_manifests(target(server))
    assert list(found) == ["ckpt/dag/run/export-4"]
    manifest = found["ckpt/dag/run/export-4"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.path for file in manifest.files}
    assert verify(target(server, "ckpt/dag/run/export-4"), manifest) == {}
    assert "loss" in manifest.metrics

    output = plan.nodes[0].output_dir
    words = [str(tiny / "model"), f"{output}/checkpoint-4", result["path"]]
    done = subprocess.run([str(trainer_python()), "-c", FORWARD, *words], capture_output=True, text=True, check=True)
    to_adapter, to_base = map(float, done.stdout.split()[-2:])
    assert to_adapter < 0.1 < to_base, "the merged model speaks like model and adapter together"

    # A cleared task whose job has ended well runs nothing again, and sends nothing again.
    task.try_number = 2
    assert task.operator.execute(task.context)["url"] == result["url"]
    assert task.handle["generation"] == 1

    decisions = PruneOperator(task_id="prune", plan=plan.model_dump(mode="json")).execute({})
    assert "export-4" not in {item["name"] for item in decisions["bucket"]}
    assert list(find_manifests(target(server))) == ["ckpt/dag/run/export-4"]


def stand_in_plan(site: Site, **more: Any) -> LaunchPlan:
    """A plan whose job is the stand-in, and a LoRA checkpoint on node2 alone."""
    plan = site.plan(export={"args": {"merge_lora": True}}, tuner_type="lora", **more)
    state = {"trainer_state.json": json.dumps({"global_step": 2, "log_history": [{"step": 2, "eval_loss": 1.0}]})}
    layouts.write(Path(plan.nodes[1].output_dir) / "checkpoint-2", {**layouts.ADAPTER, **state})
    return plan


def test_without_the_section_nothing_is_done_and_nothing_skipped(site: Site) -> None:
    assert ExportTask(site.plan()).operator.execute({}) is None


def test_a_run_without_a_whole_checkpoint_says_what_there_is(site: Site) -> None:
    plan = site.plan(export={"args": {"merge_lora": True}}, tuner_type="lora")
    task = ExportTask(plan)
    with pytest.raises(ExportFailed, match=r"no whole checkpoint \(newest is wanted\): it has none at all"):
        task.operator.execute(task.context)
    layouts.write(Path(plan.nodes[0].output_dir) / "checkpoint-2", {"adapter_config.json": "{}"})
    with pytest.raises(ExportFailed, match="checkpoint-2 is incomplete"):
        task.operator.execute(task.context)


def test_a_result_that_is_not_whole_does_not_count_and_the_next_try_begins_anew(site: Site) -> None:
    """The stand-in ends well and makes no model, as an export on a full disk may."""
    plan = stand_in_plan(site)
    task = ExportTask(plan)
    trigger = task.execute()
    assert [node["name"] for node in trigger.serialize()[1]["nodes"]] == ["node2"], "where the weights are"
    with pytest.raises(ExportFailed, match="on node2 is not whole: the folder is missing or empty"):
        task.complete(task.follow(trigger))
    left = Path(plan.nodes[1].output_dir).parent / "export" / "checkpoint-2"
    layouts.write(left, {"config.json": "{}"})
    task.try_number = 2
    with pytest.raises(TaskDeferred):
        task.operator.execute(task.context)
    assert task.handle["generation"] == 2
    assert not (left / "config.json").exists(), "what was left is gone before the job starts"
