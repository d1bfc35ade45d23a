"""What a user sees and does in Airflow's own UI, in a real browser."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Page, expect

from local.airflow import AirflowClient
from local.laptop import Laptop
from tests.browser.pages import TriggerForm, log_in, open_dag, show_graph, try_to_log_in
from tests.conftest import ENDED, wait_for

DAG = "swift_train"
TASKS = ["plan", "preflight", "stage", "train", "export", "backup", "prune"]
SECTIONS = ["Run", "Data", "Training", "Checkpoints", "Advanced"]


@pytest.fixture
def url(laptop: Laptop, client: AirflowClient) -> str:
    """Airflow's address; ``client`` has waited until the DAG is there."""
    assert laptop.airflow is not None
    return laptop.airflow.url


@pytest.fixture
def form(page: Page, url: str) -> TriggerForm:
    open_dag(page, url, DAG)
    return TriggerForm(page)


def test_a_wrong_password_is_refused_and_the_right_one_lets_in(stranger: Page, url: str, laptop: Laptop) -> None:
    assert laptop.airflow is not None
    try_to_log_in(stranger, url, "admin", "wrong")
    expect(stranger.get_by_text("Invalid credentials")).to_be_visible()
    log_in(stranger, url, "admin", laptop.airflow.password)
    stranger.goto(f"{url}/dags")
    for dag in (DAG, "swift_nightly"):
        expect(stranger.get_by_role("link", name=dag, exact=True).first).to_be_visible()


def test_the_graph_shows_the_tasks_in_the_order_of_a_run(page: Page, url: str) -> None:
    open_dag(page, url, DAG)
    places = show_graph(page)
    assert sorted(places, key=lambda task: places[task]) == TASKS


def test_the_form_can_be_sent_as_it_opens(form: TriggerForm) -> None:
    expect(form.button).to_be_enabled()
    for title in SECTIONS:
        expect(form.section(title)).to_be_visible()
        form.section(title).click()
        expect(form.button).to_be_enabled()
    assert form.dialog.locator("[aria-invalid=true]").count() == 0


def test_a_number_is_kept_within_its_limits(form: TriggerForm) -> None:
    form.section("Training").click()
    for name, typed, kept in (
        ("max_steps", "0", "1"),
        ("learning_rate", "0.00001", "0.00001"),
        ("learning_rate", "5", "1"),
        ("per_device_train_batch_size", "-3", "1"),
    ):
        field = form.field(name)
        field.fill(typed)
        field.press("Tab")
        expect(field).to_have_value(kept)


def test_a_dry_run_from_the_form_ends_in_success(form: TriggerForm, client: AirflowClient) -> None:
    before = {run["dag_run_id"] for run in client.get(f"/dags/{DAG}/dagRuns")["dag_runs"]}
    form.section("Run").click()
    form.choose("recipe", "tiny-cpu")
    form.switch_on("dry_run")
    form.button.click()
    expect(form.dialog).to_be_hidden()
    run_id = wait_for(
        lambda: {run["dag_run_id"] for run in client.get(f"/dags/{DAG}/dagRuns")["dag_runs"]} - before, bool, 20
    ).pop()
    conf = client.get(f"/dags/{DAG}/dagRuns/{run_id}")["conf"]
    assert (conf["recipe"], conf["dry_run"], conf["max_steps"]) == ("tiny-cpu", True, None), json.dumps(conf)
    state = wait_for(lambda: client.run_state(DAG, run_id), lambda state: state in ENDED, 120)
    assert state == "success", client.task_log(DAG, run_id, "preflight")[-4000:]
    states = {task: item["state"] for task, item in client.task_instances(DAG, run_id).items()}
    assert states == dict.fromkeys(TASKS[:2], "success") | dict.fromkeys(TASKS[2:], "skipped")
