"""How the control side reaches nodes (asyncssh) and buckets (oss2), through ordinary Airflow connections."""
