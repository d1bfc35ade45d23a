# Every command that a developer or CI needs. `make help` lists them.
PYTHON ?= python3
VENV := .build/venv
KEEP ?=
PY = $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo stop setup test check format lint types contracts unit airflow-tests cluster-tests oss-tests e2e engines faults soak bench lock clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: ## build both environments (once; minutes) and this clone's overlay
	@$(PYTHON) -m local.envs trainer overlay >/dev/null

demo: setup ## one nightly retraining on this machine; KEEP=1 leaves Airflow up
	@$(PY) -m local.demo $(if $(KEEP),--keep)

stop: ## end what `make demo KEEP=1` left up
	@$(PY) -m local.demo --stop

test: ## everything that CI runs, from nothing
	@bash .ci/run

check: format lint types contracts unit ## what to run before a commit: under a minute

format: ## write code in the project's format
	@$(PY) -m ruff format -q .

lint: ## ruff, without changing anything
	@$(PY) -m ruff check . && $(PY) -m ruff format --check -q .

types: ## mypy, strict
	@$(PY) -m mypy

contracts: ## who may import whom
	@$(VENV)/bin/lint-imports --no-logo --cache-dir .import_linter_cache

unit: ## pure logic, seconds
	@$(PY) -m pytest -q tests/unit

oss-tests: ## the local OSS server against four foreign clients
	@$(PY) -m pytest -q tests/oss_server

airflow-tests: ## operators, trigger and DAGs in a real Airflow database
	@$(PY) -m pytest -q tests/airflow

cluster-tests: ## real sshd on several hosts
	@$(PY) -m pytest -q tests/cluster

e2e: ## the whole main job through a real Airflow, and its UI in a real browser
	@$(PY) -m pytest -q tests/e2e/test_main_job.py tests/e2e/test_export.py tests/e2e/test_nights.py tests/e2e/test_secrets.py tests/browser

engines: ## every engine that trains on CPU, and a training that is cut and goes on; 4 minutes
	@$(PY) -m pytest -q tests/e2e/test_engines.py

faults: ## killed parts and cancels of every kind, through a real Airflow; 8 to 10 minutes on two cores
	@$(PY) -m pytest -q tests/e2e/test_faults.py

N ?= 200
SEED ?= 1
soak: ## N runs with random faults on real nodes, judged from /proc and the nodes' files
	@$(PY) -m tests.cluster.soak --runs $(N) --seed $(SEED)

bench: ## figures of the docs, each with its peer from the same run
	@$(PY) -m benchmarks.dag_import && $(PY) -m benchmarks.overhead

lock: ## make the locks again from requirements/*.in; the trainer's from what its environment resolved to
	@for name in airflow dev; do $(VENV)/bin/uv pip compile -q --no-emit-index-url --no-header --no-annotate -p 3.11 requirements/$$name.in -o requirements/$$name.txt; done
	@rm -rf .build/lock && $(PYTHON) -m venv .build/lock && .build/lock/bin/pip install -q -r requirements/trainer.in
	@.build/lock/bin/pip freeze | sed -E 's/\+cpu$$//' > requirements/trainer.txt && rm -rf .build/lock

clean: ## remove what was built in this clone
	@rm -rf .build .local-run .mypy_cache .ruff_cache .pytest_cache
