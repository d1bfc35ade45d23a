"""A DAG per recipe file: what a user sees of good and of broken recipes, in the bag and in Airflow's database."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.dag_processing.dagbag import DagBag

from swift_provider.config import ConfigError
from swift_provider.retry import MOST_RETRIES
from tests.airflow.home import PROJECT

RECIPE = """\
name: {name}
swift:
  args: {{model: org/model, dataset: [/data/a.jsonl], lora_rank: 8}}
cluster: one-gpu-node
"""
TASKS = ["plan", "preflight", "stage", "train", "backup", "prune"]


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Configuration with the shipped clusters and no recipe."""
    folder = tmp_path / "configs"
    shutil.copytree(PROJECT / "include" / "configs", folder)
    for path in (folder / "recipes").glob("*.yaml"):
        path.unlink()
    monkeypatch.setenv("SWIFT_CONFIG_DIR", str(folder))
    return folder


def write(configs: Path, name: str, more: str = "") -> None:
    (configs / "recipes" / f"{name}.yaml").write_text(RECIPE.format(name=name) + more)


def bag(file: str = "swift_recipes.py") -> DagBag:
    return DagBag(str(PROJECT / "dags" / file))


def test_which_recipes_have_a_dag(configs: Path) -> None:
    write(configs, "nightly-1", 'schedule: "0 2 * * *"\n')
    write(configs, "by-hand", "dag: true\n")
    write(configs, "other")
    write(configs, "opted-out", 'schedule: "0 2 * * *"\ndag: false\n')
    found = bag()
    assert found.import_errors == {}
    assert set(found.dags) == {"swift_nightly-1", "swift_by-hand"}
    nightly, by_hand = found.dags["swift_nightly-1"], found.dags["swift_by-hand"]
    assert (nightly.schedule, by_hand.schedule) == ("0 2 * * *", None)
    assert (nightly.max_active_runs, by_hand.max_active_runs) == (1, 16)
    for dag in found.dags.values():
        assert dag.is_paused_upon_creation
        assert [task.task_id for task in dag.topological_sort()] == TASKS
        assert all(task.retries == MOST_RETRIES for task in dag.tasks)
        dag.params.validate()


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("schedule: every night\n", "recipes/bad.yaml:5: schedule"),
        ('schedule: "0 2 * * *"\nclustre: x\n', "recipes/bad.yaml:6: clustre"),
        ("dag: true\noverridable: [lora_rnk]\n", "recipes/bad.yaml: overridable[0]: lora_rnk"),
        ("dag: true\n- [\n", "recipes/bad.yaml:"),
    ],
)
def test_a_broken_recipe_is_one_import_error_and_hides_nothing(configs: Path, more: str, key: str) -> None:
    write(configs, "good", 'schedule: "0 2 * * *"\n')
    write(configs, "bad", more)
    found = bag()
    assert found.import_errors == {}
    assert set(found.dags) == {"swift_good", "swift_bad"}
    bad = found.dags["swift_bad"]
    assert key in str(bad.doc_md)
    assert "broken recipe" in bad.tags
    assert bad.schedule is None
    assert [task.task_id for task in bad.topological_sort()] == TASKS  # a run under way comes to its end
    [error] = bag("swift_recipe_faults.py").import_errors.values()
    assert key in error
    assert "good.yaml" not in error
    context = {"dag_run": SimpleNamespace(dag_id="swift_bad", run_id="r"), "params": {}}
    with pytest.raises(ConfigError) as caught:
        bad.get_task("plan").execute(context)
    assert key in str(caught.value)


EXPORT = "dag: true\nexport: {args: {merge_lora: true}}\n"


@pytest.mark.parametrize(
    ("more", "tasks"),
    [
        (EXPORT, [*TASKS[:4], "export", *TASKS[4:]]),
        (EXPORT + "clustre: x\n", [*TASKS[:4], "export", *TASKS[4:]]),  # broken while a run was under way
        ("dag: true\n", TASKS),
    ],
)
def test_only_a_recipe_that_says_so_has_an_export(configs: Path, more: str, tasks: list[str]) -> None:
    write(configs, "mine", more)
    dag = bag().dags["swift_mine"]
    assert [task.task_id for task in dag.topological_sort()] == tasks
    assert dag.get_task("backup").trigger_rule == "all_done", (
        "what was trained is mirrored, whatever came of the export"
    )
    assert dag.get_task("prune").upstream_task_ids == {"plan", "train", "backup", "export"} & set(tasks)
    assert dag.get_task("prune").trigger_rule == "all_success", "skipped in a dry run"


def test_a_broken_recipe_that_wants_no_dag_gets_none(configs: Path) -> None:
    write(configs, "bad", "clustre: x\n")
    assert bag().dags == {}
    assert bag("swift_recipe_faults.py").import_errors


def test_the_report_is_silent_when_all_is_right(configs: Path) -> None:
    write(configs, "good")
    found = bag("swift_recipe_faults.py")
    assert (found.import_errors, found.dags) == ({}, {})


def test_a_recipe_cannot_take_the_id_of_a_dag_file(configs: Path) -> None:
    write(configs, "train", "dag: true\n")
    assert bag().dags == {}
    [error] = bag("swift_recipe_faults.py").import_errors.values()
    assert "swift_train is that of a file in dags/" in error


def test_overridable_arguments_become_typed_fields(configs: Path) -> None:
    names = "lora_rank, warmup_ratio, packing, torch_dtype, target_modules, wandb_log_unique_prompts, seed, lora_rank"
    write(configs, "form", f"dag: true\noverridable: [{names.replace('wandb_log_unique_prompts, ', '')}, tf32]\n")
    params = bag().dags["swift_form"].params
    schemas = {name: params.get_param(name).schema for name in params}
    assert schemas["lora_rank"]["type"] == ["null", "integer"]
    assert schemas["warmup_ratio"]["type"] == ["null", "number"]
    assert schemas["packing"]["type"] == "boolean"
    assert params["packing"] is False
    assert schemas["torch_dtype"]["enum"] == [None, "bfloat16", "float16", "float32"]
    assert schemas["target_modules"]["items"] == {"type": "string"}
    assert schemas["tf32"]["enum"] == [None, "true", "false"]
    assert params["lora_rank"] is None
    assert "`8`" in schemas["lora_rank"].get("description_md", "") or "`8`" in str(
        params.get_param("lora_rank").description
    )
    params.validate()


def test_the_database_keeps_the_good_ones_and_the_error(configs: Path, tmp_path: Path) -> None:
    """What the web UI reads: in Airflow an import error makes every DAG of its own file stale."""
    write(configs, "good", 'schedule: "0 2 * * *"\n')
    write(configs, "bad", 'schedule: "0 2 * * *"\nclustre: x\n')
    code = f"""
from airflow.utils.db import initdb
initdb()
from airflow.dag_processing.dagbag import BundleDagBag, sync_bag_to_db
from airflow.models.dag import DagModel
from airflow.models.dagbundle import DagBundleModel
from airflow.models.errors import ParseImportError
from airflow.utils.session import create_session
with create_session() as session:
    session.merge(DagBundleModel(name="dags-folder"))
folder = {str(PROJECT / "dags")!r}
for _ in range(2):
    sync_bag_to_db(BundleDagBag(folder, bundle_path=__import__("pathlib").Path(folder), bundle_name="dags-folder"),
                   "dags-folder", None)
with create_session() as session:
    dags = {{dag.dag_id: (dag.is_stale, dag.is_paused) for dag in session.query(DagModel)}}
    errors = [(error.filename, error.stacktrace) for error in session.query(ParseImportError)]
assert dags["swift_good"] == (False, True), dags
assert dags["swift_bad"] == (False, True), dags
assert dags["swift_train"][0] is False, dags
ours = [(name, text) for name, text in errors if name == "swift_recipe_faults.py"]
assert len(ours) == 1, errors
assert "recipes/bad.yaml:6: clustre: unknown key" in ours[0][1]
assert not [name for name, _ in errors if name == "swift_recipes.py"], errors
print("fine")
"""
    import os

    environment = {**os.environ, "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{tmp_path}/airflow.db"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, timeout=240
    )
    assert done.stdout.strip().endswith("fine"), done.stdout[-3000:] + done.stderr[-3000:]


def test_a_worker_makes_the_one_dag_that_it_needs(configs: Path, python: Callable[[str], str]) -> None:
    write(configs, "one", "dag: true\n")
    write(configs, "two", "dag: true\n")
    code = (
        "import os; os.environ['_AIRFLOW_PARSING_CONTEXT_DAG_ID'] = 'swift_two'\n"
        "from swift_provider.recipe_dags import build_recipe_dags\nprint(sorted(build_recipe_dags()))"
    )
    assert python(code) == "['swift_two']"
