"""One operator per task of the DAG, in the order of a run: plan, preflight, stage, train, backup, prune."""
