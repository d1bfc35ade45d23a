"""``plan``: recipe, cluster and parameters of the run → launch plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from airflow.sdk import BaseHook, BaseOperator, Context

from swift_provider.config import Cluster, Recipe, load_cluster, load_recipe
from swift_provider.planning.params import params_of
from swift_provider.planning.planner import make_plan
from swift_provider.settings import config_dir


class PlanOperator(BaseOperator):
    """Returns the launch plan of this run, as JSON; every later task works from it.

    Touches no node. Fails with every fault of the recipe, the cluster file and the run's parameters at once.

    Args:
        recipe: name of a file in ``include/configs/recipes``, without ``.yaml``.
        cluster: overrides the recipe's cluster.
    """

    template_fields: Sequence[str] = ("recipe", "cluster")

    def __init__(self, *, recipe: str, cluster: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.recipe, self.cluster = recipe, cluster

    def execute(self, context: Context) -> dict[str, Any]:
        """See the class.

        Raises:
            ConfigError: something is wrong; never worth a retry.
        """
        folder = config_dir()
        recipe = load_recipe(self.recipe, folder)
        cluster = load_cluster(self.cluster or recipe.cluster, folder)
        params_of(recipe)  # what is wrong with the file comes before connections that may not be there
        run = context["dag_run"]
        plan = make_plan(
            recipe,
            cluster,
            dag_id=run.dag_id,
            run_id=run.run_id,
            params=dict(context["params"]),
            hosts=self._hosts(cluster),
            config_dir=folder,
            model_config=_model_config(recipe, context["params"]),
        )
        self.log.info("launch plan\n%s", plan.describe())
        return plan.model_dump(mode="json")

    def _hosts(self, cluster: Cluster) -> dict[str, str]:
        without_address = [node.ssh_conn_id for node in cluster.nodes if node.address is None]
        return {conn_id: BaseHook.get_connection(conn_id).host or "" for conn_id in without_address}


def _model_config(recipe: Recipe, params: Mapping[str, Any]) -> dict[str, Any] | None:
    """The model's ``config.json`` where Airflow can read it, as on a shared disk; elsewhere nothing is estimated."""
    model = str((params.get("extra_args") or {}).get("model") or recipe.swift.args["model"])
    if not model.startswith("/"):
        return None
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None
