"""One DAG per recipe file: ``dags/swift_recipes.py`` makes them, ``dags/swift_recipe_faults.py`` reports broken files.

Two files, because Airflow hides every DAG of a file that has an import error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from airflow.sdk import DAG, get_parsing_context

from swift_provider.config import ConfigError, Fault, list_recipes, load_recipe
from swift_provider.dag import build_broken_dag, build_recipe_dag, recipe_dag_id
from swift_provider.planning.params import params_of
from swift_provider.settings import config_dir


def build_recipe_dags(taken: Path | None = None) -> dict[str, DAG]:
    """The DAG of every recipe that has a schedule or says ``dag: true``; a broken recipe's DAG says what is wrong.

    In a worker only the DAG of the task at hand is made.

    Args:
        taken: folder of the DAG files, whose names are the ids of their DAGs; a recipe's DAG gets none of these.
    """
    wanted = get_parsing_context().dag_id
    ids = {path.stem for path in taken.glob("*.py")} if taken else set()
    dags = {}
    for name in list_recipes(config_dir()):
        dag_id = recipe_dag_id(name)
        if dag_id in ids or wanted not in (None, dag_id):
            continue
        try:
            if load_recipe(name, config_dir()).has_dag:
                dags[dag_id] = build_recipe_dag(name)
        except ConfigError as error:
            if _may_want_dag(name):
                dags[dag_id] = build_broken_dag(name, error, exports="export" in (_as_far_as_it_goes(name) or {}))
    return dags


def check_recipe_files(taken: Path | None = None) -> None:
    """Looks at every recipe file.

    Raises:
        ConfigError: with the faults of all of them.
    """
    if get_parsing_context().dag_id is not None:
        return
    faults: list[Fault] = []
    ids = {path.stem for path in taken.glob("*.py")} if taken else set()
    for name in list_recipes(config_dir()):
        try:
            recipe = load_recipe(name, config_dir())
            params_of(recipe)
        except ConfigError as error:
            faults += error.faults
            continue
        if recipe.has_dag and recipe_dag_id(name) in ids:
            problem = f"DAG id {recipe_dag_id(name)} is that of a file in dags/; rename the recipe, or say dag: false"
            faults.append(Fault(f"recipes/{name}.yaml", "name", problem))
    if faults:
        raise ConfigError(faults)


def _may_want_dag(name: str) -> bool:
    """Whether a recipe that cannot be read as a whole asks for a DAG, as far as it can be read."""
    content = _as_far_as_it_goes(name)
    if content is None:
        return True
    wish = content.get("dag")
    return wish if isinstance(wish, bool) else "schedule" in content


def _as_far_as_it_goes(name: str) -> dict[str, Any] | None:
    try:
        content = yaml.safe_load((config_dir() / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return content if isinstance(content, dict) else None
