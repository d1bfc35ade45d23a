"""The laptop: a cluster of loopback nodes, an OSS server and Airflow, used by the demo and by the tests alike."""
