"""A whole Airflow on 127.0.0.1: API server, scheduler, DAG processor, triggerer, SQLite, LocalExecutor.

The components are started one by one and not through ``airflow standalone``, because the log servers of its scheduler
and triggerer listen on all addresses; without them the API server reads the log files themselves.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from local.processes import end, spawn

COMPONENTS: dict[str, list[str]] = {
    "scheduler": ["scheduler", "--skip-serve-logs"],
    "dag-processor": ["dag-processor"],
    "triggerer": ["triggerer", "--skip-serve-logs"],
}
USER = "admin"
#: The scheduler's idle workers and the triggerer's runner take much longer to end than there is reason to wait.
STOP_GRACE_S = 4.0


@dataclass
class LocalAirflow:
    """One Airflow installation.

    Args:
        home: its ``AIRFLOW_HOME``; kept between runs.
        project: the checkout whose DAGs and plugins it loads.
        venv: the environment to run it with.
        port: of the API server.
        variables: further environment variables for all components.
    """

    home: Path
    project: Path
    venv: Path
    port: int
    variables: Mapping[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where its web UI and REST API are."""
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        """The environment of every component and of ``airflow`` commands for this installation."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
        return {
            **inherited,
            "PATH": f"{self.venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.project / "dags"),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(self.project / "plugins"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin,viewer:viewer",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self.home / "passwords.json"),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.home}/airflow.db",
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "60",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.variables,
        }

    def command(self, *arguments: str, stdin: str | None = None) -> str:
        """Runs ``airflow ARGUMENTS`` and returns what it printed.

        Raises:
            RuntimeError: it failed; the message ends with its last lines.
        """
        done = subprocess.run(
            [str(self.venv / "bin" / "airflow"), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            env=self.environment(),
            check=False,
        )
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
            raise RuntimeError(f"airflow {' '.join(arguments)}: exit status {done.returncode}\n{tail}")
        return done.stdout

    def prepare(self, connections: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        """Makes the database, the users' passwords, connections and pools; safe to repeat."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o700)
        self._write_private("passwords.json", self._passwords())
        self.command("db", "migrate")
        self._write_private("connections.json", connections)
        self.command("connections", "import", "--overwrite", str(self.home / "connections.json"))
        (self.home / "connections.json").unlink()
        self._write_private("pools.json", pools)
        self.command("pools", "import", str(self.home / "pools.json"))

    def _passwords(self) -> dict[str, str]:
        path = self.home / "passwords.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        return {user: known.get(user) or secrets.token_urlsafe(12) for user in (USER, "viewer")}

    def _write_private(self, name: str, value: Mapping[str, Any]) -> None:
        path = self.home / name
        path.touch(mode=0o600)
        path.write_text(json.dumps(value, indent=1))

    @property
    def password(self) -> str:
        """The password of user ``admin``."""
        return str(json.loads((self.home / "passwords.json").read_text())[USER])

    def start(self, timeout: float = 180.0) -> None:
        """Starts all components and waits until each reports itself healthy.

        Raises:
            RuntimeError: a component ended.
            TimeoutError: not all are healthy within ``timeout`` seconds.
        """
        for name in COMPONENTS:
            self.start_component(name)
        self.start_component("api-server")
        limit = time.monotonic() + timeout
        while not self.healthy():
            for name, process in self.processes.items():
                if process.poll() is not None:
                    log = self.home / f"{name}.out"
                    raise RuntimeError(f"{name} ended with status {process.returncode}; see {log}")
            if time.monotonic() > limit:
                raise TimeoutError(f"Airflow is not healthy after {timeout:g} s; see {self.home}/*.out")
            time.sleep(0.5)

    def start_component(self, name: str) -> None:
        """Starts one component; its output goes to ``<home>/<name>.out``."""
        command = COMPONENTS.get(name) or ["api-server", "--host", "127.0.0.1", "--port", str(self.port)]
        self.processes[name] = spawn(
            [str(self.venv / "bin" / "airflow"), *command],
            self.home / f"{name}.out",
            env=self.environment(),
            cwd=self.home,
        )

    def healthy(self) -> bool:
        """Every component says that it is well."""
        try:
            health = httpx.get(f"{self.url}/api/v2/monitor/health", timeout=5).json()
        except (httpx.HTTPError, ValueError):
            return False
        wanted = ("metadatabase", "scheduler", "triggerer", "dag_processor")
        return all((health.get(name) or {}).get("status") == "healthy" for name in wanted)

    def stop(self) -> None:
        """Ends all components: a moment to end by themselves, then whatever they left behind is killed."""
        for process in self.processes.values():
            process.terminate()
        limit = time.monotonic() + STOP_GRACE_S
        while time.monotonic() < limit and any(process.poll() is None for process in self.processes.values()):
            time.sleep(0.1)
        for process in self.processes.values():
            end(process, grace=0.0)
        self.processes.clear()

    def client(self) -> AirflowClient:
        """A REST client, logged in as ``admin``."""
        return AirflowClient(self.url, USER, self.password)


class AirflowClient:
    """The parts of Airflow's REST API that the demo and the tests use; repeats what SQLite refuses when it is busy."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=30)
        answer = self._http.post("/auth/token", json={"username": user, "password": password})
        answer.raise_for_status()
        self._http.headers["Authorization"] = f"Bearer {answer.json()['access_token']}"

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """One request below ``/api/v2``; a 5xx answer is tried again, up to five times."""
        for attempt in range(5):
            answer = self._http.request(method, f"/api/v2{path}", **arguments)
            if answer.status_code < 500:
                break
            time.sleep(1 + attempt)
        return answer

    def get(self, path: str, **params: Any) -> Any:
        """The JSON of a GET that must succeed."""
        answer = self.request("GET", path, params=params)
        answer.raise_for_status()
        return answer.json()

    def wait_for_dag(self, dag_id: str, timeout: float = 120.0) -> None:
        """Returns when the DAG has been parsed, and unpauses it.

        Raises:
            RuntimeError: it did not appear; the message holds the import errors.
        """
        limit = time.monotonic() + timeout
        while self.request("PATCH", f"/dags/{dag_id}", json={"is_paused": False}).status_code != 200:
            if time.monotonic() > limit:
                errors = self.get("/importErrors")["import_errors"]
                raise RuntimeError(f"DAG {dag_id} did not appear within {timeout:g} s; import errors: {errors}")
            time.sleep(1)

    def trigger(self, dag_id: str, run_id: str, conf: Mapping[str, Any]) -> None:
        """Starts a run; the same ``run_id`` twice starts it once.

        Raises:
            httpx.HTTPStatusError: Airflow refuses the parameters; the answer's body names them.
        """
        body = {"dag_run_id": run_id, "logical_date": None, "conf": dict(conf)}
        answer = self.request("POST", f"/dags/{dag_id}/dagRuns", json=body)
        if answer.status_code != 409:
            answer.raise_for_status()

    def run_state(self, dag_id: str, run_id: str) -> str:
        """``queued``, ``running``, ``success`` or ``failed``."""
        return str(self.get(f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def task_instances(self, dag_id: str, run_id: str) -> dict[str, dict[str, Any]]:
        """The task instances of a run, by task id."""
        answer = self.get(f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances")
        return {item["task_id"]: item for item in answer["task_instances"]}

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        """An XCom's value, or ``None`` where there is none yet."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}"
        answer = self.request("GET", path, params={"deserialize": True})
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        value = answer.json()["value"]
        if isinstance(value, str):
            try:
                return json.loads(value)
            except ValueError:
                return value
        return value

    def set_run_state(self, dag_id: str, run_id: str, state: str) -> None:
        """Marks a run ``failed`` or ``success``, as a user does in the UI."""
        self.request("PATCH", f"/dags/{dag_id}/dagRuns/{run_id}", json={"state": state}).raise_for_status()

    def task_log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """The log of one try, as text."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}"
        answer = self.request("GET", path, params={"full_content": True}, headers={"Accept": "application/json"})
        answer.raise_for_status()
        content = answer.json()["content"]
        return "\n".join(_log_text(item) for item in content)


def _log_text(item: Any) -> str:
    """One structured log record as the UI shows it, with the exceptions that it carries."""
    if not isinstance(item, dict):
        return str(item)
    errors = [f"{error['exc_type']}: {error['exc_value']}" for error in item.get("error_detail") or []]
    return "\n".join([str(item.get("event", item)), *errors])


if __name__ == "__main__":
    sys.exit("this module is used by local.demo and by the tests")
