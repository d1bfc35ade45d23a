"""An Airflow DAG that brings a checkpoint back from the bucket to the nodes of a cluster."""

from datetime import timedelta

from airflow.sdk import DAG, Param

from swift_provider.config import list_clusters, list_recipes
from swift_provider.operators.restore import RestoreOperator
from swift_provider.settings import config_dir, default_recipe

recipes, clusters = list_recipes(config_dir()), list_clusters(config_dir())

with DAG(
    dag_id="swift_restore",
    description="Bring a checkpoint back from the bucket to the nodes",
    schedule=None,
    catchup=False,
    render_template_as_native_obj=True,
    tags=["swift"],
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    params={
        "recipe": Param(
            default_recipe(recipes),
            type=["null", "string"],
            enum=[*recipes, None],
            title="Recipe",
            description_md="Whose.",
        ),
        "checkpoint": Param(
            "latest",
            type="string",
            minLength=1,
            title="Checkpoint",
            description_md="`latest`, `best`, `<run>/checkpoint-8`, or `oss://…/checkpoint-8`.",
        ),
        "cluster": Param(
            None,
            type=["null", "string"],
            enum=[None, *clusters],
            title="Cluster",
            description_md="Empty: the recipe's.",
        ),
        "nodes": Param(
            None, type=["null", "array"], items={"type": "string"}, title="Nodes", description_md="Empty: all."
        ),
        "target": Param(
            None,
            type=["null", "string"],
            title="Folder",
            description_md="Absolute path on the nodes. Empty: `restored/<run>` below `shared_dir` or the work folder.",
        ),
        "oss_conn_id": Param(
            None, type=["null", "string"], title="OSS connection", description_md="Empty: the recipe's."
        ),
    },
) as dag:
    RestoreOperator(
        task_id="restore",
        checkpoint="{{ params.checkpoint }}",
        recipe="{{ params.recipe }}",
        cluster="{{ params.cluster }}",
        nodes="{{ params.nodes }}",
        target="{{ params.target }}",
        oss_conn_id="{{ params.oss_conn_id }}",
    )
