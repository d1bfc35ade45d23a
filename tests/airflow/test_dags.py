"""The DAG files as Airflow's DAG processor sees them, and what of this project each Airflow process loads."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import RetryAction

from swift_provider import exceptions
from swift_provider.config import ConfigError, Fault
from swift_provider.retry import MOST_RETRIES, TrainingRetryPolicy
from tests.airflow.home import PROJECT

TASKS = ["plan", "preflight", "stage", "train", "backup", "prune"]


@pytest.fixture(scope="module")
def dags() -> DagBag:
    return DagBag(str(PROJECT / "dags"))


def test_every_dag_is_imported(dags: DagBag) -> None:
    assert dags.import_errors == {}
    from_recipes = {f"swift_{path.stem}" for path in (PROJECT / "include/configs/recipes").glob("qwen*.yaml")}
    files = {path.stem for path in (PROJECT / "dags").glob("*.py")} - {"swift_recipes", "swift_recipe_faults"}
    assert set(dags.dags) == files | from_recipes
    assert {"swift_train", "swift_nightly"} <= set(dags.dags)


@pytest.mark.parametrize(
    ("dag_id", "tasks"), [("swift_train", [*TASKS[:4], "export", *TASKS[4:]]), ("swift_nightly", TASKS)]
)
def test_the_tasks_follow_the_order_of_a_run(dags: DagBag, dag_id: str, tasks: list[str]) -> None:
    """Only a DAG whose recipe says so, or that may run any recipe, has an export."""
    dag = dags.dags[dag_id]
    assert [task.task_id for task in dag.topological_sort()] == tasks
    for before, after in itertools.pairwise(tasks):
        assert after in dag.get_task(before).downstream_task_ids
    for task in dag.tasks:
        assert task.retries == MOST_RETRIES
        assert isinstance(task.retry_policy, TrainingRetryPolicy)


def test_the_nightly_dag_runs_by_itself_one_at_a_time(dags: DagBag) -> None:
    dag = dags.dags["swift_nightly"]
    assert dag.schedule == "0 2 * * *"
    assert dag.max_active_runs == 1
    assert not dag.catchup
    assert dag.is_paused_upon_creation
    dag.params.validate()  # a scheduled run has nobody who fills in a form
    assert "recipe" not in dag.params


def test_the_manual_dag_offers_every_recipe_and_can_be_triggered_as_it_is(dags: DagBag) -> None:
    dag = dags.dags["swift_train"]
    assert dag.schedule is None
    dag.params.validate()
    names = sorted(path.stem for path in (PROJECT / "include" / "configs" / "recipes").glob("*.yaml"))
    assert dag.params.get_param("recipe").schema["enum"] == names


def test_no_text_field_blocks_the_form(dags: DagBag) -> None:
    """Airflow's form refuses an empty text field whose type does not include null."""
    for dag in (dags.dags["swift_train"], dags.dags["swift_nightly"]):
        for name, param in dag.params.items():
            schema = dag.params.get_param(name).schema
            if param is None:
                assert "null" in schema["type"], name
            assert param != "", name


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ("schedul: '0 2 * * *'", "unknown key"),
        ("schedule: every night", "is not a cron expression"),
        ("cluster: [", "is not YAML"),
    ],
)
def test_a_broken_recipe_is_an_import_error_with_file_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, text: str
) -> None:
    configs = tmp_path / "configs"
    shutil.copytree(PROJECT / "include" / "configs", configs)
    path = configs / "recipes" / "tiny-cpu.yaml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith(recipe.partition(":")[0] + ":")]
    path.write_text("\n".join([*lines, recipe, ""]))
    monkeypatch.setenv("SWIFT_CONFIG_DIR", str(configs))
    [error] = DagBag(str(PROJECT / "dags" / "swift_nightly.py")).import_errors.values()
    assert "recipes/tiny-cpu.yaml:" in error
    assert text in error
    if text != "is not YAML":
        assert recipe.partition(":")[0] in error


def test_a_recipe_without_a_schedule_cannot_be_scheduled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = tmp_path / "configs"
    shutil.copytree(PROJECT / "include" / "configs", configs)
    path = configs / "recipes" / "tiny-cpu.yaml"
    path.write_text("".join(line for line in path.open() if not line.startswith("schedule:")))
    monkeypatch.setenv("SWIFT_CONFIG_DIR", str(configs))
    [error] = DagBag(str(PROJECT / "dags" / "swift_nightly.py")).import_errors.values()
    assert "tiny-cpu has no schedule" in error


# -- what is loaded -----------------------------------------------------------------------------------------------


def test_the_plugin_loader_imports_nothing_twice(python: Callable[[str], str]) -> None:
    """Airflow runs every file below the plugins folder as a top-level module unless ``.airflowignore`` forbids it."""
    code = """
import json, sys
counts = {}
class Count:
    def find_spec(self, name, path=None, target=None):
        counts[name] = counts.get(name, 0) + 1
sys.meta_path.insert(0, Count())
from airflow import plugins_manager
plugins, errors = plugins_manager._get_plugins()
ours = {name: getattr(m, "__file__", "") or "" for name, m in sys.modules.items()}
ours = {name: file for name, file in ours.items() if "/plugins/" in file}
print(json.dumps({"plugins": [p.name for p in plugins], "errors": errors, "modules": sorted(ours),
                  "files": sorted(ours.values()), "count": counts.get("swift_provider.plugin")}))
"""
    seen = json.loads(python(code))
    assert seen["errors"] == {}
    assert seen["plugins"].count("swift") == 1
    assert seen["count"] == 1
    assert len(seen["files"]) == len(set(seen["files"]))
    assert {name for name in seen["modules"] if not name.startswith("swift_provider")} <= {"swift_plugin"}


def modules_after(python: Callable[[str], str], code: str) -> set[str]:
    return set(json.loads(python(f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))")))


PARSE = f"import runpy; runpy.run_path({str(PROJECT / 'dags' / 'swift_train.py')!r})"


def test_parsing_a_dag_imports_nothing_heavy(python: Callable[[str], str]) -> None:
    loaded = modules_after(python, PARSE)
    assert "swift_provider.dag" in loaded
    assert not loaded & {"torch", "swift", "deepspeed", "transformers", "oss2", "paramiko", "numpy", "pandas"}


def test_parsing_a_dag_does_not_import_asyncssh(python: Callable[[str], str]) -> None:
    assert "asyncssh" not in modules_after(python, PARSE)


def test_the_plugin_itself_imports_nothing_of_the_provider(python: Callable[[str], str]) -> None:
    loaded = modules_after(python, "import swift_provider.plugin")
    assert not loaded & {"asyncssh", "oss2", "swift_provider.hooks.nodes", "swift_provider.dag"}


def test_the_provider_is_listed_with_its_connection_form(python: Callable[[str], str]) -> None:
    code = """
import json
from airflow.providers_manager import ProvidersManager
manager = ProvidersManager()
form = sorted(name.removeprefix("extra__oss__") for name in manager.connection_form_widgets if "__oss__" in name)
print(json.dumps({"there": "swift-provider" in manager.providers, "form": form,
                  "hidden": sorted(manager.field_behaviours["oss"]["hidden_fields"])}))
"""
    seen = json.loads(python(code))
    assert seen["there"]
    assert seen["form"] == [
        "access_key_id",
        "access_key_secret",
        "auth_type",
        "endpoint",
        "region",
        "security_token",
    ]
    assert "password" in seen["hidden"]


# -- the retry policy -----------------------------------------------------------------------------------------------

NEVER, MINUTE = 1, timedelta(minutes=1)


@pytest.mark.parametrize(
    ("error", "tries", "delay"),
    [
        (ConfigError([Fault("recipes/r.yaml", "cluster", "is missing")]), NEVER, None),
        (exceptions.HostKeyUnknown("x"), NEVER, None),
        (exceptions.DeadlineExceeded("x"), NEVER, None),
        (exceptions.TrainingStopped("x"), NEVER, None),
        (exceptions.TrainingRefused("x"), NEVER, None),
        (exceptions.NoProgress("x"), NEVER, None),
        (exceptions.NodeBusy("x"), MOST_RETRIES + 1, 5 * MINUTE),
        (exceptions.NodeUnreachable("x"), 16, 2 * MINUTE),
        (exceptions.NodeLost("x"), 8, 2 * MINUTE),
        (exceptions.TrainingFailed("x"), 8, MINUTE),
        (exceptions.PreflightFailed("x"), 3, MINUTE),
        (exceptions.GangStartFailed("x"), 3, MINUTE),
        (RuntimeError("x"), 3, MINUTE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_failure_has_its_budget(error: Exception, tries: int, delay: timedelta | None) -> None:
    for policy in (TrainingRetryPolicy(), TrainingRetryPolicy.deserialize(TrainingRetryPolicy().serialize())):
        last = policy.evaluate(error, tries, MOST_RETRIES + 1)
        assert (last.action, last.retry_delay) == (RetryAction.FAIL, None)
        assert last.reason
        if tries > NEVER:
            before = policy.evaluate(error, tries - 1, MOST_RETRIES + 1)
            assert (before.action, before.retry_delay) == (RetryAction.RETRY, delay)
