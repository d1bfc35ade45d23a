"""A LoRA and its merged model through a real Airflow; and the next plan, which knows how fast the last run was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from local.airflow import AirflowClient
from local.laptop import Laptop
from trainer.store import find_manifests, verify

RUN, NEXT = "e2e-export", "e2e-export-next"
TASKS = ("plan", "preflight", "stage", "train", "export", "backup", "prune")


@pytest.fixture(scope="module")
def exported(run_to_end: Callable[..., str], client: AirflowClient) -> dict[str, Any]:
    state = run_to_end(RUN, recipe="tiny-lora-cpu")
    if state != "success":
        failed = [task for task, item in client.task_instances("swift_train", RUN).items() if item["state"] == "failed"]
        pytest.fail("\n".join(f"{task}:\n{client.task_log('swift_train', RUN, task)[-6000:]}" for task in failed))
    return dict(client.xcom("swift_train", RUN, "export"))


def test_every_task_succeeded_at_the_first_try(exported: dict[str, Any], client: AirflowClient) -> None:
    tasks = client.task_instances("swift_train", RUN)
    assert {name: (tasks[name]["state"], tasks[name]["try_number"]) for name in TASKS} == dict.fromkeys(
        TASKS, ("success", 1)
    )


def test_the_best_checkpoint_is_merged_and_survives_the_prune(
    exported: dict[str, Any], client: AirflowClient, laptop: Laptop
) -> None:
    losses = {item["name"]: item["metrics"]["eval_loss"] for item in client.xcom("swift_train", RUN, "backup")}
    best = min(losses, key=lambda name: losses[name])
    step = best.rpartition("-")[2]
    assert exported["checkpoint"] == best
    assert exported["url"] == f"oss://swift-demo/checkpoints/swift_train/{RUN}/export-{step}"
    target = laptop.oss_target(f"checkpoints/swift_train/{RUN}/export-{step}")
    manifests = find_manifests(target)
    manifest = manifests[target.prefix]
    assert verify(target, manifest) == {}
    names = {file.path for file in manifest.files}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not any(name.startswith("adapter_") for name in names)
    assert manifest.metrics["eval_loss"] == losses[best]


def test_the_next_plan_forecasts_with_the_speed_of_this_run(
    exported: dict[str, Any], client: AirflowClient, run_to_end: Callable[..., str]
) -> None:
    assert run_to_end(NEXT, recipe="tiny-lora-cpu", dry_run=True) == "success"
    speed = client.xcom("swift_train", RUN, "train")["seconds_per_step"]
    log = client.task_log("swift_train", NEXT, "plan")
    assert f"= 8 steps x {speed:g} s (measured in the last good run)" in log
    states = {name: item["state"] for name, item in client.task_instances("swift_train", NEXT).items()}
    assert {states[name] for name in ("train", "export", "prune")} == {"skipped"}
