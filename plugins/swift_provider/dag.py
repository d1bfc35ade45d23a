"""The factory that turns a recipe into a DAG: plan → preflight → stage → train → [export →] backup → prune."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param

from swift_provider.config import ConfigError, Recipe, list_recipes, load_cluster, load_recipe
from swift_provider.operators.backup import BackupOperator
from swift_provider.operators.export import ExportOperator
from swift_provider.operators.plan import PlanOperator
from swift_provider.operators.preflight import PreflightOperator
from swift_provider.operators.prune import PruneOperator
from swift_provider.operators.stage import StageOperator
from swift_provider.operators.train import TrainOperator
from swift_provider.planning.params import RUN_PARAMS, RunParam, params_of
from swift_provider.retry import MOST_RETRIES, TrainingRetryPolicy
from swift_provider.settings import config_dir, default_recipe, retry_delay

DOC = """\
Trains with ms-swift on a cluster of GPU nodes, over SSH, and mirrors the checkpoints to OSS.

**plan** resolves recipe, cluster and parameters · **preflight** checks every node · **stage** puts model and data
there · **train** starts the gang and follows it, deferred · **export** merges or quantizes a checkpoint, where the
recipe says so · **backup** mirrors every complete checkpoint and writes
its manifest last · **prune** applies the retention policy to nodes and bucket.
"""


def build_training_dag(
    recipe: str | None = None,
    *,
    dag_id: str,
    scheduled: bool = False,
    pool: str | None = None,
    retries: int = MOST_RETRIES,
    **dag_arguments: Any,
) -> DAG:
    """A training DAG.

    Args:
        recipe: name of a file in ``include/configs/recipes``, without ``.yaml``; ``None`` lets each run choose.
        dag_id: the DAG's id.
        scheduled: follow the recipe's ``schedule``; otherwise the DAG runs when it is triggered.
        pool: Airflow pool of the train task; default: that of the recipe's cluster. Create it with
            ``include_deferred``, else a deferred training occupies no slot.
        retries: tries after the first, at most; :mod:`swift_provider.retry` decides which failure gets how many.
        dag_arguments: further arguments of :class:`airflow.sdk.DAG`.

    Raises:
        ConfigError: the recipe is wrong, or is to be scheduled and has no schedule; shows as the DAG's import error.
    """
    loaded = load_recipe(recipe, config_dir()) if recipe else None
    names = list_recipes(config_dir())
    dag = DAG(
        dag_id=dag_id,
        description=(loaded.description if loaded else "") or "Train a recipe on a cluster",
        schedule=_schedule(loaded, dag_id) if scheduled else None,
        params=_params(loaded, names),
        max_active_runs=1 if scheduled else 16,
        **_common(retries),
        **dag_arguments,
    )
    exports = loaded is None or loaded.export is not None
    _add_tasks(dag, recipe or "{{ params.recipe }}", pool or _pool(loaded) or "default_pool", exports)
    return dag


def build_recipe_dag(recipe: str) -> DAG:
    """The DAG ``swift_<recipe>`` of a recipe that wants one: on its schedule, if it has one, and paused at creation.

    Raises:
        ConfigError: the recipe is wrong.
    """
    loaded = load_recipe(recipe, config_dir())
    return build_training_dag(
        recipe, dag_id=recipe_dag_id(recipe), scheduled=loaded.schedule is not None, is_paused_upon_creation=True
    )


def build_broken_dag(recipe: str, error: ConfigError, *, exports: bool = False, retries: int = MOST_RETRIES) -> DAG:
    """What stands in for the DAG of a recipe that is wrong: it says so, and its ``plan`` task fails with all faults.

    It has the same tasks, so that a run which was under way when the file was broken comes to its end.
    """
    faults = "\n".join(f"- `{fault}`" for fault in error.faults)
    dag = DAG(
        dag_id=recipe_dag_id(recipe),
        description=f"BROKEN: {error.faults[0]}",
        schedule=None,
        params=_params(None, []) | {"recipe": Param(recipe, type="string", title="Recipe", section="Run")},
        max_active_runs=1,
        is_paused_upon_creation=True,
        **_common(retries)
        | {
            "doc_md": f"**This recipe is wrong.** Correct it; `swift-provider validate` tells when it is right.\n\n"
            f"{faults}\n",
            "tags": ["swift", "broken recipe"],
        },
    )
    _add_tasks(dag, recipe, "default_pool", exports)
    return dag


def recipe_dag_id(recipe: str) -> str:
    """The id of a recipe's own DAG."""
    return f"swift_{recipe}"


def _common(retries: int) -> dict[str, Any]:
    return {
        "catchup": False,
        "render_template_as_native_obj": True,
        "doc_md": DOC,
        "tags": ["swift"],
        "default_args": {
            "retries": retries,
            "retry_delay": retry_delay(timedelta(minutes=1)),  # where a task process dies without an exception
            "retry_policy": TrainingRetryPolicy(),
        },
    }


def _add_tasks(dag: DAG, recipe: str, pool: str, exports: bool) -> None:
    with dag:
        plan = PlanOperator(task_id="plan", recipe=recipe)
        preflight = PreflightOperator(task_id="preflight", plan=plan.output)
        stage = StageOperator(task_id="stage", plan=plan.output)
        train = TrainOperator(
            task_id="train",
            plan=plan.output,
            staged=stage.output,
            pool=pool,
        )
        # What a failed training has saved is worth as much as a good one's; the run still fails, through prune.
        backup = BackupOperator(
            task_id="backup", plan=plan.output, facts=preflight.output, follows=train.task_id, trigger_rule="all_done"
        )
        prune = PruneOperator(task_id="prune", plan=plan.output)
        plan >> preflight >> stage >> train >> backup >> prune
        train >> prune
        if exports:
            export = ExportOperator(task_id="export", plan=plan.output, staged=stage.output, pool=pool)
            train >> export >> backup
            export >> prune


def _schedule(recipe: Recipe | None, dag_id: str) -> str:
    if recipe is None or recipe.schedule is None:
        name = recipe.name if recipe else "no recipe"
        raise ValueError(f'DAG {dag_id} is to be scheduled, but {name} has no schedule; add e.g. schedule: "0 2 * * *"')
    return recipe.schedule


def _pool(recipe: Recipe | None) -> str | None:
    """The pool of the recipe's cluster; what is wrong with the cluster file is for the plan task to tell."""
    if recipe is None:
        return None
    try:
        return load_cluster(recipe.cluster, config_dir()).pool
    except ConfigError:
        return None


def _params(recipe: Recipe | None, names: list[str]) -> dict[str, Param]:
    params = {param.name: _param(param, recipe) for param in (params_of(recipe) if recipe else RUN_PARAMS)}
    if recipe is None:
        choice = Param(
            default_recipe(names),
            type="string" if names else ["null", "string"],
            enum=names or None,
            title="Recipe",
            section="Run",
            description_md="A file in `include/configs/recipes`.",
        )
        params = {"recipe": choice, **params}
    return params


def _param(param: RunParam, recipe: Recipe | None) -> Param:
    """The form field; its default is the recipe's own value where the recipe is fixed and has one."""
    default, told = param.default, ""
    if recipe is not None and param.argument:
        value = recipe.swift.args.get(param.name)
        if param.name == "dataset" and isinstance(value, str):
            value = [value]
        told = f" The recipe says `{json.dumps(value)}`." if value is not None else ""
    elif recipe is not None and param.name == "keep_last":
        told = f" The recipe says `{recipe.checkpoints.keep_last}`."
    has_own_hint = param.default is not None or "Empty:" in param.description
    hint = "" if has_own_hint else " Empty: as the recipe says."
    return Param(
        default,
        title=param.title,
        section=param.section,
        description_md=(param.description + told + hint).strip(),
        **param.schema,
    )
