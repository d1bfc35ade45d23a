"""Every engine that trains without a GPU, for real: the DAG, ms-swift, one or two nodes without a shared disk."""

from __future__ import annotations

import functools
import json
import math
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from local.airflow import AirflowClient
from local.laptop import Laptop
from swift_provider.planning.names import run_key
from tests.conftest import ENDED, wait_for
from tests.e2e.engines import ENGINES, SAVE_STEPS, STEPS, put_datasets
from tests.e2e.faults import DAG, Pair, kill, until
from trainer.process import read_environ
from trainer.protocol import Manifest
from trainer.store import list_manifests, open_bucket

pytestmark = pytest.mark.timeout(600)


@dataclass
class Trained:
    """One run of one recipe."""

    laptop: Laptop
    client: AirflowClient
    recipe: str
    run_id: str

    @property
    def nodes(self) -> list[Path]:
        """The work folders, in the order of the ranks."""
        cluster = ENGINES[self.recipe][0]
        folders = [self.laptop.folder / "nodes" / node / cluster for node in ("node1", "node2")]
        return folders[: 1 if cluster == "one-process" else 2]

    def start(self) -> Trained:
        self.client.trigger(DAG, self.run_id, {"recipe": self.recipe})
        return self

    def wait(self) -> Trained:
        state = wait_for(lambda: self.client.run_state(DAG, self.run_id), lambda state: state in ENDED, 400)
        assert state == "success", self.tell()
        return self

    def tell(self) -> str:
        tasks = self.client.task_instances(DAG, self.run_id)
        failed = [task for task, item in tasks.items() if item["state"] in ("failed", "up_for_retry")]
        return "\n".join(f"{task}:\n{self.client.task_log(DAG, self.run_id, task)[-6000:]}" for task in failed)

    def logs(self) -> list[str]:
        """For each node, everything that its jobs of this run have written."""
        return [
            "".join(path.read_text(errors="replace") for path in sorted(node.glob(f"jobs/*{self.digest}*/log")))
            for node in self.nodes
        ]

    @property
    def digest(self) -> str:
        """What the ids of this run's jobs have in common."""
        return str(self.client.xcom(DAG, self.run_id, "train")["job_id"]).rsplit(".", 2)[1]

    def losses(self) -> dict[int, float]:
        """Step → loss; the last row of a step counts, since a resumed training appends."""
        key = run_key(DAG, self.run_id)
        found: dict[int, float] = {}
        for node in self.nodes:
            path = node / "runs" / key / "output" / "logging.jsonl"
            for line in path.read_text().splitlines() if path.exists() else []:
                row = json.loads(line)
                if "loss" in row:
                    found[int(row["global_step/max_steps"].partition("/")[0])] = float(row["loss"])
        return found

    def manifests(self) -> list[Manifest]:
        found = [item for item in list_manifests(self.laptop.oss_target(self.recipe)) if item.run_id == self.run_id]
        return sorted(found, key=lambda item: item.step)

    def arguments(self, step: int) -> dict[str, Any]:
        """What ms-swift recorded of its own arguments, from the bucket."""
        key = f"{self.recipe}/{DAG}/{self.run_id}/checkpoint-{step}/args.json"
        return dict(json.loads(open_bucket(self.laptop.oss_target()).get_object(key).read()))


@pytest.fixture(scope="module")
def start(laptop: Laptop, client: AirflowClient) -> Callable[..., Trained]:
    put_datasets(laptop)
    return lambda recipe, run_id: Trained(laptop, client, recipe, run_id).start()


@pytest.fixture(scope="module")
def whole(start: Callable[..., Trained]) -> Callable[[str], Trained]:
    """The run of a recipe from its first step to its last; one after the other, since they want the same nodes."""
    return functools.cache(lambda recipe: start(recipe, f"engine-{recipe}").wait())


@pytest.fixture(scope="module", params=ENGINES)
def trained(request: pytest.FixtureRequest, whole: Callable[[str], Trained]) -> Trained:
    return whole(request.param)


def test_the_ranks_form_one_world(trained: Trained) -> None:
    logs = trained.logs()
    for rank, log in enumerate(logs):
        assert "End time of running main" in log
        if len(logs) > 1:
            assert re.search(rf"rank: {rank}, local_rank: 0, world_size: {len(logs)}", log)
            assert "parallel_mode != ParallelMode.DISTRIBUTED" not in log


def test_every_step_has_a_finite_loss(trained: Trained) -> None:
    losses = trained.losses()
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert all(math.isfinite(loss) for loss in losses.values())
    result = trained.client.xcom(DAG, trained.run_id, "train")
    assert (result["step"], result["generation"]) == (STEPS, 1)


def test_the_bucket_holds_whole_checkpoints_of_that_world(trained: Trained) -> None:
    wanted = {
        "single-pt-lora": "adapter+ddp",
        "ddp-lora": "adapter+ddp",
        "zero2-full": "full+deepspeed",
        "zero3-dpo-full": "full+deepspeed",
    }[trained.recipe]
    found = [(item.step, item.format, item.verdict, item.world_size) for item in trained.manifests()]
    assert found == [(step, wanted, "complete", len(trained.nodes)) for step in (SAVE_STEPS, STEPS)]


def test_ms_swift_has_taken_the_recipe_at_its_word(trained: Trained) -> None:
    recorded, (_, command, args) = trained.arguments(STEPS), ENGINES[trained.recipe]
    assert recorded["tuner_type"] == args["tuner_type"]
    assert recorded["global_world_size"] == len(trained.nodes)
    assert recorded["torch_dtype"] == "bfloat16"
    assert recorded.get("rlhf_type") == args.get("rlhf_type")
    if command == "pt":
        assert recorded["use_chat_template"] is False
    deepspeed = recorded.get("deepspeed")
    assert (deepspeed is not None) == ("deepspeed" in args)
    if deepspeed is not None:
        stage = {"zero2": 2, "own-zero3.json": 3}[args["deepspeed"]]
        assert deepspeed["zero_optimization"]["stage"] == stage
        if stage == 3:
            assert deepspeed["zero_optimization"]["sub_group_size"] == 12345678


def test_a_run_that_is_cut_goes_on_to_the_losses_of_one_that_was_not(
    whole: Callable[[str], Trained], start: Callable[..., Trained], laptop: Laptop
) -> None:
    uncut = whole("zero2-full")
    cut = start("zero2-full", "engine-cut")
    pair = Pair(laptop.folder, "two-processes")
    until(lambda: SAVE_STEPS + 1 in cut.losses(), 240, cut.tell, pause=0.05)
    kill(rank_of(pair), signal.SIGKILL)
    cut.wait()
    assert cut.client.xcom(DAG, cut.run_id, "train")["generation"] == 2
    for node in cut.nodes:
        [path] = node.glob(f"jobs/*{cut.digest}.g2/swift.yaml")
        resumed = Path(yaml.safe_load(path.read_text())["resume_from_checkpoint"])
        assert resumed == node / "runs" / run_key(DAG, cut.run_id) / "output" / f"checkpoint-{SAVE_STEPS}"
    assert sorted(cut.losses()) == list(range(1, STEPS + 1))
    assert cut.losses() == pytest.approx(uncut.losses(), rel=1e-3)
    assert [item.step for item in cut.manifests()] == [SAVE_STEPS, STEPS]


def rank_of(pair: Pair) -> int:
    """The rank on the second node."""
    wanted = {b"RANK=1", b"LOCAL_RANK=0"}
    [pid] = [pid for pid in pair.pids("node2") if wanted <= set(read_environ(pid))]
    return pid
