"""An Airflow DAG that finds what no run owns any more: jobs on nodes, broken uploads, old folders.

It ends or deletes only what its parameters tell it to.
"""

from airflow.sdk import DAG, Param

from swift_provider.operators.cleanup import CleanUpOperator
from swift_provider.operators.housekeeping import HousekeepingOperator

with DAG(
    dag_id="swift_housekeeping",
    description="Compare the jobs on all nodes with the runs in Airflow; clean up nodes and buckets once a day",
    schedule="*/30 * * * *",
    catchup=False,
    max_active_runs=1,
    render_template_as_native_obj=True,
    tags=["swift"],
    params={
        "policy": Param(
            "report",
            type="string",
            enum=["report", "stop"],
            title="Jobs without an owner",
            description_md="`report` lists them, `stop` also ends them.",
        ),
        "leftovers": Param(
            "report",
            type="string",
            enum=["report", "delete"],
            title="Leftovers",
            section="Clean up",
            description_md="Broken uploads, old job folders and old downloads: `report` lists, `delete` also deletes.",
        ),
        "grace_hours": Param(
            24,
            type="number",
            minimum=1,
            title="Grace (hours)",
            section="Clean up",
            description_md="How long nothing of a broken upload must have come. Uploads of runs under way stay.",
        ),
        "jobs_days": Param(30, type="number", minimum=0, title="Job folders (days)", section="Clean up"),
        "cache_days": Param(30, type="number", minimum=0, title="Unused downloads (days)", section="Clean up"),
        "cache_gib": Param(
            0,
            type="number",
            minimum=0,
            title="Downloads (GiB)",
            section="Clean up",
            description_md="What a node's downloads may take together; the least recently used go first. 0: any.",
        ),
    },
) as dag:
    HousekeepingOperator(task_id="housekeeping", policy="{{ params.policy }}")
    CleanUpOperator(
        task_id="clean_up",
        policy="{{ params.leftovers }}",
        grace_hours="{{ params.grace_hours }}",
        jobs_days="{{ params.jobs_days }}",
        cache_days="{{ params.cache_days }}",
        cache_gib="{{ params.cache_gib }}",
    )
