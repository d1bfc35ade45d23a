"""The Airflow DAG of the nightly run; its schedule is in the recipe.

Unpause the DAG to begin. ``SWIFT_NIGHTLY_RECIPE`` names another recipe.
"""

import os

from swift_provider.dag import build_training_dag

dag = build_training_dag(
    os.environ.get("SWIFT_NIGHTLY_RECIPE", "tiny-cpu"),
    dag_id="swift_nightly",
    scheduled=True,
    is_paused_upon_creation=True,
)
