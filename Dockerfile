# syntax=docker/dockerfile:1
# The Airflow side: API server, scheduler, DAG processor, triggerer and workers all run this image.
#
#   docker build -t swift-airflow .
#
# Nothing secret belongs in here: connections come from Airflow's database, a secrets backend, or
# AIRFLOW_CONN_* variables of the running container.
ARG AIRFLOW_IMAGE=apache/airflow:3.3.2-python3.11

# Some of the pinned packages exist as sources only; the compiler stays in this stage.
FROM ${AIRFLOW_IMAGE} AS build
USER root
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*
USER airflow
WORKDIR /tmp/source
COPY --chown=airflow:0 requirements/airflow.txt requirements/
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /tmp/wheels -r requirements/airflow.txt
COPY --chown=airflow:0 pyproject.toml README.md ./
COPY --chown=airflow:0 plugins/swift_provider/ plugins/swift_provider/
COPY --chown=airflow:0 trainer/ trainer/
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /tmp/wheels .

FROM ${AIRFLOW_IMAGE}
USER airflow
# The project comes as a wheel: its entry point brings the OSS connection form, so plugins/ stays empty.
RUN --mount=type=bind,from=build,source=/tmp/wheels,target=/tmp/wheels \
    python -m pip install --no-cache-dir --no-deps --no-index /tmp/wheels/*.whl
COPY --chown=airflow:0 dags/ ${AIRFLOW_HOME}/dags/
COPY --chown=airflow:0 include/ ${AIRFLOW_HOME}/include/
ENV SWIFT_CONFIG_DIR=${AIRFLOW_HOME}/include/configs
