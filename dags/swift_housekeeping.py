"""An Airflow DAG that finds jobs on the nodes that no run owns any more, and ends them if its parameter says so."""

from airflow.sdk import DAG, Param

from swift_provider.operators.housekeeping import HousekeepingOperator

with DAG(
    dag_id="swift_housekeeping",
    description="Compare the jobs on all nodes with the runs in Airflow",
    schedule="*/30 * * * *",
    catchup=False,
    max_active_runs=1,
    tags=["swift"],
    params={
        "policy": Param(
            "report",
            type="string",
            enum=["report", "stop"],
            title="Jobs without an owner",
            description_md="`report` lists them, `stop` also ends them.",
        )
    },
) as dag:
    HousekeepingOperator(task_id="housekeeping", policy="{{ params.policy }}")
