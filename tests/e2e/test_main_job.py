"""The main job, end to end: two nodes train one world, the bucket holds verified checkpoints, the old ones are gone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from local.airflow import AirflowClient
from local.laptop import Laptop
from tests.conftest import training_processes, wait_for
from trainer.protocol import FetchReply, FetchRequest, Manifest, loads
from trainer.store import list_manifests, open_bucket

RUN = "e2e-main"
TASKS = ("plan", "preflight", "stage", "train", "export", "backup", "prune")


@pytest.fixture(scope="module")
def trained(run_to_end: Callable[..., str], client: AirflowClient) -> str:
    state = run_to_end(RUN)
    if state != "success":
        failed = [task for task, item in client.task_instances("swift_train", RUN).items() if item["state"] == "failed"]
        pytest.fail("\n".join(f"{task}:\n{client.task_log('swift_train', RUN, task)[-6000:]}" for task in failed))
    return RUN


@pytest.fixture(scope="module")
def manifests(trained: str, laptop: Laptop) -> list[Manifest]:
    return sorted(
        (item for item in list_manifests(laptop.oss_target("checkpoints")) if item.run_id == trained),
        key=lambda item: item.step,
    )


def test_every_task_succeeded_at_the_first_try(trained: str, client: AirflowClient) -> None:
    tasks = client.task_instances("swift_train", trained)
    assert {name: (tasks[name]["state"], tasks[name]["try_number"]) for name in TASKS} == dict.fromkeys(
        TASKS, ("success", 1)
    )


def test_two_nodes_trained_as_one_world(trained: str, laptop: Laptop) -> None:
    logs = [next(node.workdir.glob("jobs/*/log")).read_text(errors="replace") for node in laptop.nodes]
    for rank, log in enumerate(logs):
        assert re.search(rf"rank: {rank}, local_rank: 0, world_size: 2", log)
        assert "parallel_mode != ParallelMode.DISTRIBUTED" not in log
        assert "End time of running main" in log


def test_the_live_progress_reached_the_api(trained: str, client: AirflowClient) -> None:
    value = client.xcom("swift_train", trained, "train", "progress")
    assert value["progress"]["step"] == value["progress"]["max_steps"] == 24
    assert {name: node["phase"] for name, node in value["nodes"].items()} == {"node1": "exited", "node2": "exited"}
    result = client.xcom("swift_train", trained, "train")
    assert result["generation"] == 1
    assert result["step"] == 24


def test_no_log_byte_is_lost(trained: str, client: AirflowClient, laptop: Laptop) -> None:
    shown = client.task_log("swift_train", trained, "train")
    for node in laptop.nodes:
        raw = next(node.workdir.glob("jobs/*/log")).read_bytes()
        for line in raw.rstrip(b"\n").split(b"\n"):
            text = line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", "replace")
            assert f"[{node.name}] {text}".rstrip() in shown


def test_the_bucket_holds_what_the_manifests_say(manifests: list[Manifest], laptop: Laptop) -> None:
    from oss2.utils import Crc64

    bucket = open_bucket(laptop.oss_target())
    for manifest in manifests:
        prefix = f"checkpoints/swift_train/{RUN}/{manifest.name}"
        names = {file.path for file in manifest.files}
        step = manifest.step
        for rank in (0, 1):
            assert f"global_step{step}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt" in names
            assert f"global_step{step}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" in names
            assert f"rng_state_{rank}.pth" in names
        for file in manifest.files:
            crc = Crc64()
            content = bucket.get_object(f"{prefix}/{file.path}").read()
            crc.update(content)
            assert (str(crc.crc), len(content)) == (file.crc64, file.size)
        assert manifest.world_size == 2
        assert "eval_loss" in manifest.metrics
        assert manifest.versions["ms-swift"] == "4.6.0"
        assert manifest.recipe == "tiny-cpu"


def test_pruning_left_exactly_what_the_policy_says(
    manifests: list[Manifest], client: AirflowClient, laptop: Laptop
) -> None:
    decisions = client.xcom("swift_train", RUN, "prune")
    losses = {item["name"]: item["metrics"]["eval_loss"] for item in client.xcom("swift_train", RUN, "backup")}
    assert set(losses) == {f"checkpoint-{step}" for step in (6, 12, 18, 24)}
    wanted = {"checkpoint-18", "checkpoint-24", min(losses, key=lambda name: losses[name])}
    assert {item.name for item in manifests} == wanted
    on_disk = {path.name for path in laptop.folder.glob("shared/runs/*/output/checkpoint-*")}
    assert on_disk == wanted
    for where in decisions.values():
        assert {item["name"] for item in where if item["keep"]} == wanted
        assert all(item["reason"] for item in where)
    gone = set(losses) - wanted
    bucket = open_bucket(laptop.oss_target())
    for name in gone:
        assert not bucket.list_objects_v2(prefix=f"checkpoints/swift_train/{RUN}/{name}/").object_list


def test_a_downloaded_checkpoint_resumes_at_its_step(
    manifests: list[Manifest], laptop: Laptop, client: AirflowClient, run_to_end: Callable[..., str]
) -> None:
    import subprocess
    import sys

    from trainer.protocol import dumps

    source = manifests[-2]
    target = laptop.oss_target(f"checkpoints/swift_train/{RUN}/{source.name}")
    destination = laptop.folder / "shared" / "restored" / source.name
    request = FetchRequest(target=replace(target), destination=str(destination))
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "fetch"],
        input=dumps(request).encode(),
        capture_output=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert loads(FetchReply, done.stdout.decode()).error is None
    run_id = "e2e-resume"
    assert run_to_end(run_id, resume_from=str(destination), max_steps=source.step + 4, save_steps=4) == "success"
    rows = [
        json.loads(line)
        for line in next(laptop.folder.glob(f"shared/runs/*{run_id}*/output/logging.jsonl")).read_text().splitlines()
    ]
    steps = [int(row["global_step/max_steps"].split("/")[0]) for row in rows if "loss" in row]
    assert min(steps) > source.step
    assert max(steps) == source.step + 4


def test_a_dry_run_ends_green_after_preflight(run_to_end: Callable[..., str], client: AirflowClient) -> None:
    assert run_to_end("e2e-dry", dry_run=True) == "success"
    states = {name: item["state"] for name, item in client.task_instances("swift_train", "e2e-dry").items()}
    assert (states["plan"], states["preflight"], states["stage"], states["train"]) == (
        "success",
        "success",
        "skipped",
        "skipped",
    )
    assert "node2" in client.task_log("swift_train", "e2e-dry", "preflight")


@pytest.mark.parametrize(
    ("conf", "named"),
    [({"learning_rate": "fast"}, "learning_rate"), ({"max_steps": 0}, "max_steps"), ({"recipe": "nope"}, "recipe")],
)
def test_a_bad_parameter_is_refused_with_its_name(client: AirflowClient, conf: dict[str, Any], named: str) -> None:
    with pytest.raises(httpx.HTTPStatusError) as caught:
        client.trigger("swift_train", "e2e-refused", {"recipe": "tiny-cpu", **conf})
    assert caught.value.response.status_code == 400
    assert named in caught.value.response.text


def test_a_misspelt_parameter_fails_the_plan_at_once(run_to_end: Callable[..., str], client: AirflowClient) -> None:
    assert run_to_end("e2e-misspelt", lerning_rate=0.1) == "failed"
    task = client.task_instances("swift_train", "e2e-misspelt")["plan"]
    assert (task["state"], task["try_number"]) == ("failed", 1)
    assert "did you mean 'learning_rate'?" in client.task_log("swift_train", "e2e-misspelt", "plan")


def test_mark_failed_leaves_no_process_on_any_node(client: AirflowClient, laptop: Laptop) -> None:
    run_id = "e2e-cancel"
    client.trigger("swift_train", run_id, {"recipe": "tiny-cpu", "max_steps": 100000})
    wait_for(
        lambda: (client.xcom("swift_train", run_id, "train", "progress") or {}).get("progress"),
        lambda progress: bool(progress and progress["step"] > 0),
        200,
    )
    assert len(training_processes(laptop)) >= 4
    client.set_run_state("swift_train", run_id, "failed")
    wait_for(lambda: training_processes(laptop), lambda pids: not pids, 45)


def test_airflow_is_content(client: AirflowClient, laptop: Laptop) -> None:
    assert laptop.airflow is not None
    assert client.get("/importErrors")["total_entries"] == 0
    assert "swift-provider" in laptop.airflow.command("providers", "list")
    dags = {item["dag_id"]: item for item in client.get("/dags")["dags"]}
    assert dags["swift_nightly"]["timetable_summary"] == "0 2 * * *"
    assert dags["swift_nightly"]["is_paused"]
