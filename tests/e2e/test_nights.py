"""Two nights of one recipe through a real Airflow: the second one's prune knows that the first one's run has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from local.airflow import AirflowClient
from local.laptop import Laptop
from trainer import store

RECIPE, NIGHTS = "stand-in-nights", ("e2e-night-1", "e2e-night-2")


def test_the_second_night_takes_the_place_of_the_first(
    laptop: Laptop, client: AirflowClient, run_to_end: Callable[..., str]
) -> None:
    place = laptop.oss_target(RECIPE)
    first, second = (f"{RECIPE}/swift_train/{night}" for night in NIGHTS)
    assert run_to_end(NIGHTS[0], recipe=RECIPE, max_steps=6, save_steps=2) == "success"
    assert set(store.find_manifests(place)) == {f"{first}/checkpoint-6"}
    assert run_to_end(NIGHTS[1], recipe=RECIPE, max_steps=4, save_steps=2) == "success"
    assert set(store.find_manifests(place)) == {f"{second}/checkpoint-4"}
    runs = laptop.folder / f"shared-{RECIPE}" / "runs"
    left = {f"{path.parent.parent.name}/{path.name}" for path in runs.glob("*/output/checkpoint-*")}
    assert left == {f"swift_train.{NIGHTS[1]}/checkpoint-4"}
    decisions = client.xcom("swift_train", NIGHTS[1], "prune")
    reasons = {(item["run"], item["name"]): item["reason"] for item in decisions["bucket"]}
    assert reasons[first, "checkpoint-6"] == "superseded"
    latest = store.latest(replace(place, prefix=second))
    assert latest is not None
    assert (latest.step, latest.run_type, latest.recipe) == (4, "manual", RECIPE)
    assert latest.triggered_by
    assert {"torch", "ms-swift"} & set(latest.versions)
