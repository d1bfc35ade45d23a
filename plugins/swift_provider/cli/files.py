"""Which configuration files a command line means, and what is wrong with each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_provider.config import Cluster, ConfigError, Fault, Recipe, list_clusters, list_recipes
from swift_provider.config.loading import load_cluster, parse
from swift_provider.planning.params import model_of
from swift_provider.planning.plan import LaunchPlan
from swift_provider.planning.planner import make_plan
from swift_provider.planning.shape import read_config


@dataclass(frozen=True)
class ConfigFile:
    """A recipe or cluster file; ``shown`` is its name in messages."""

    kind: str
    path: Path

    @property
    def shown(self) -> str:
        """Folder and name, as in the messages of Airflow."""
        return f"{self.kind}/{self.path.name}"


def find_files(names: list[str], config_dir: Path) -> list[ConfigFile]:
    """The files that ``names`` mean: paths, or names of recipes and clusters; all files where nothing is named.

    Raises:
        ConfigError: a name means nothing.
    """
    every = [ConfigFile("recipes", config_dir / "recipes" / f"{name}.yaml") for name in list_recipes(config_dir)]
    every += [ConfigFile("clusters", config_dir / "clusters" / f"{name}.yaml") for name in list_clusters(config_dir)]
    if not names:
        return every
    found: list[ConfigFile] = []
    faults = []
    for name in names:
        path = Path(name)
        meant = [file for file in every if name in (file.path.stem, file.shown, file.path.name)]
        if path.is_file():
            meant = [ConfigFile("clusters" if path.resolve().parent.name == "clusters" else "recipes", path)]
        if not meant:
            faults.append(Fault(name, "", f"no such file, and no recipe or cluster of that name in {config_dir}"))
        found += [file for file in meant if file not in found]
    if faults:
        raise ConfigError(faults)
    return found


def check_file(file: ConfigFile, config_dir: Path) -> None:
    """Reads a file as the DAG does, and for a recipe makes the plan of a run without parameters.

    Raises:
        ConfigError: with every fault of the file.
    """
    read(file)
    if file.kind == "recipes":
        recipe = read(file)
        plan_of(recipe, load_cluster(recipe.cluster, config_dir), {}, config_dir)


def read(file: ConfigFile) -> Any:
    """The recipe or cluster in a file.

    Raises:
        ConfigError: with every fault.
    """
    try:
        text = file.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Fault(file.shown, "", f"cannot be read: {error}")]) from None
    model: type[Any] = Cluster if file.kind == "clusters" else Recipe
    value = parse(model, text, file.shown, os.environ, file.path.parent)
    if value.name != file.path.stem:
        raise ConfigError(
            [Fault(file.shown, "name", f"is {value.name}, but the file is {file.path.name}; make them equal")]
        )
    return value


def plan_of(
    recipe: Recipe,
    cluster: Cluster,
    params: dict[str, Any],
    config_dir: Path,
    hosts: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """The plan that the DAG would make.

    Args:
        recipe: what to train.
        cluster: where.
        params: what the run changes.
        config_dir: of both.
        hosts: for each ``ssh_conn_id`` the host of its connection; by default none is looked up, only named.

    Raises:
        ConfigError: with every reason why this cannot run.
    """
    if hosts is None:
        hosts = {node.ssh_conn_id: f"<host of connection {node.ssh_conn_id}>" for node in cluster.nodes}
    return make_plan(
        recipe,
        cluster,
        dag_id=f"swift_{recipe.name}",
        run_id="<run>",
        params=params,
        hosts=hosts,
        config_dir=config_dir,
        model_config=read_config(model_of(recipe, params)),
    )
