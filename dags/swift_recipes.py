"""An Airflow DAG ``swift_<name>`` for every recipe that has a schedule, or says ``dag: true``; paused at creation."""

from pathlib import Path

from swift_provider.recipe_dags import build_recipe_dags

globals().update(build_recipe_dags(Path(__file__).parent))
