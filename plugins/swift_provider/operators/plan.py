"""``plan``: recipe, cluster and parameters of the run → launch plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseHook, BaseOperator, Context

from swift_provider.config import Cluster, load_cluster, load_recipe
from swift_provider.planning.forecast import forecast
from swift_provider.planning.params import model_of, params_of
from swift_provider.planning.planner import make_plan
from swift_provider.planning.shape import read_config
from swift_provider.settings import config_dir


class PlanOperator(BaseOperator):
    """Returns the launch plan of this run, as JSON; every later task works from it.

    Touches no node. Fails with every fault of the recipe, the cluster file and the run's parameters at once.

    Args:
        recipe: name of a file in ``include/configs/recipes``, without ``.yaml``.
        cluster: overrides the recipe's cluster.
        train: id of the train task, whose last good result tells the speed.
    """

    template_fields: Sequence[str] = ("recipe", "cluster")

    def __init__(self, *, recipe: str, cluster: str | None = None, train: str = "train", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.recipe, self.cluster, self.train = recipe, cluster, train

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
        config = read_config(model_of(recipe, context["params"]))
        plan = make_plan(
            recipe,
            cluster,
            dag_id=run.dag_id,
            run_id=run.run_id,
            params=dict(context["params"]),
            hosts=self._hosts(cluster),
            config_dir=folder,
            model_config=config,
        )
        told = forecast(plan, recipe, cluster, config, self._last_result(context)).lines
        self.log.info("launch plan\n%s", "\n".join([plan.describe(), *told]))
        return plan.model_dump(mode="json")

    def _last_result(self, context: Context) -> Any:
        """What the train task of the last good run of this DAG returned; for the forecast alone, so never a failure."""
        try:
            return context["ti"].xcom_pull(task_ids=self.train, map_indexes=-1, include_prior_dates=True)
        except Exception:
            self.log.debug("no result of an earlier run can be read", exc_info=True)
            return None

    def _hosts(self, cluster: Cluster) -> dict[str, str]:
        without_address = [node.ssh_conn_id for node in cluster.nodes if node.address is None]
        return {conn_id: BaseHook.get_connection(conn_id).host or "" for conn_id in without_address}
