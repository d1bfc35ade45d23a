"""Recipe and cluster in, launch plan out. Pure functions: nothing here touches a node, a bucket or Airflow."""
