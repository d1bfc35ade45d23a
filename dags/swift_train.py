"""An Airflow DAG for manual runs: choose a recipe in the form or over the REST API."""

from swift_provider.dag import build_training_dag

dag = build_training_dag(dag_id="swift_train")
