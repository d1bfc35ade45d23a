"""No Airflow DAG: its import error names every fault of every recipe file, while the DAGs of the others stay."""

from pathlib import Path

from swift_provider.recipe_dags import check_recipe_files

check_recipe_files(Path(__file__).parent)
