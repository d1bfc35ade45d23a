"""The laptop's parts together: nodes, OSS server and Airflow in one folder, started and ended as one."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local import envs
from local.airflow import LocalAirflow
from local.nodes import LocalNode, make_nodes
from local.processes import descendants_marked, end, end_group, free_port, spawn, wait_for_port
from trainer.protocol import OssCredentials, OssTarget

PROJECT = Path(__file__).resolve().parent.parent
BUCKET = "swift-demo"
REGION = "cn-hangzhou"
#: Every process that the laptop starts has this in its environment, with the laptop's folder as its value.
MARK = "SWIFT_LOCAL_DIR"


@dataclass
class Laptop:
    """Everything that a run needs, on this machine alone.

    Args:
        folder: where all of it lives; kept between runs.
        say: where progress goes.
        config_dir: the recipes and clusters that Airflow sees.
    """

    folder: Path
    say: Callable[[str], None] = print
    config_dir: Path = PROJECT / "include" / "configs"
    nodes: list[LocalNode] = field(default_factory=list)
    airflow: LocalAirflow | None = None
    oss_process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self.settings = self._load_settings()

    def _load_settings(self) -> dict[str, Any]:
        """Ports and secrets: drawn once, so that a second run finds what the first one left."""
        path = self.folder / "settings.json"
        if path.exists():
            return dict(json.loads(path.read_text()))
        settings = {
            "airflow_port": free_port(),
            "oss_port": free_port(),
            "ssh_port": free_port("127.0.0.11"),
            "master_port": free_port("127.0.0.11"),
            "oss_key_id": "local-demo",
            "oss_key_secret": secrets.token_urlsafe(24),
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(settings))
        return settings

    @property
    def trainer_env(self) -> Path:
        """The folder of the trainer environment, built if needed."""
        return envs.ensure("trainer")

    @property
    def oss_endpoint(self) -> str:
        """Where the OSS server listens."""
        return f"http://127.0.0.1:{self.settings['oss_port']}"

    def oss_target(self, prefix: str = "") -> OssTarget:
        """The demo's bucket, with the key that opens it."""
        credentials = OssCredentials(self.settings["oss_key_id"], self.settings["oss_key_secret"])
        return OssTarget(self.oss_endpoint, REGION, BUCKET, prefix, credentials)

    def start_servers(self) -> None:
        """Starts the nodes and the OSS server; ends what an earlier run may have left in this folder."""
        self.end_leftovers()
        self.nodes = make_nodes(self.folder, port=self.settings["ssh_port"])
        for node in self.nodes:
            node.start()
        if any(node.server != "sshd" for node in self.nodes):
            self.say("no sshd on this machine: asyncssh's server takes its place (apt-get install openssh-server)")
        (self.folder / "shared").mkdir(exist_ok=True)
        self.oss_process = spawn(
            [
                sys.executable,
                "-m",
                "local.oss_server",
                *("--root", str(self.folder / "oss"), "--port", str(self.settings["oss_port"])),
                *("--access-key-id", self.settings["oss_key_id"], "--bucket", BUCKET, "--region", REGION),
            ],
            self.folder / "oss-server.log",
            env={**os.environ, "OSS_SERVER_ACCESS_KEY_SECRET": self.settings["oss_key_secret"], MARK: str(self.folder)},
            cwd=PROJECT,
        )
        wait_for_port("127.0.0.1", self.settings["oss_port"], 30, self.oss_process)

    def start_airflow(self) -> LocalAirflow:
        """Starts Airflow with connections and pool for the laptop's parts."""
        self.airflow = LocalAirflow(
            home=self.folder / "airflow",
            project=PROJECT,
            venv=envs.ensure_overlay(),
            port=self.settings["airflow_port"],
            variables=self.variables(),
        )
        self.airflow.prepare(
            self.connections(), {"swift_local": {"slots": 1, "description": "local nodes", "include_deferred": True}}
        )
        self.airflow.start()
        return self.airflow

    def variables(self) -> dict[str, str]:
        """What ``clusters/local.yaml`` refers to."""
        python = self.trainer_env / "bin" / "python"
        return {
            MARK: str(self.folder),
            "SWIFT_CONFIG_DIR": str(self.config_dir),
            "SWIFT_DEFAULT_RECIPE": "tiny-cpu",
            "SWIFT_LOCAL_MASTER_PORT": str(self.settings["master_port"]),
            "SWIFT_LOCAL_PYTHON": str(python),
            "SWIFT_LOCAL_EXTENSIONS": str(envs.torch_extensions_dir(self.trainer_env)),
        }

    def connections(self) -> dict[str, Any]:
        """The Airflow connections of the nodes and the bucket."""
        oss = {
            "conn_type": "oss",
            "extra": {
                "auth_type": "AK",
                "access_key_id": self.settings["oss_key_id"],
                "access_key_secret": self.settings["oss_key_secret"],
                "region": REGION,
                "endpoint": self.oss_endpoint,
            },
        }
        return {"oss_default": oss} | {f"swift_local_{node.name}": node.connection() for node in self.nodes}

    def put_inputs(self) -> None:
        """Makes the tiny model and its data, and puts them into the bucket, once."""
        from trainer.store import open_bucket

        bucket = open_bucket(self.oss_target())
        if bucket.object_exists("datasets/sums-eval.jsonl"):
            return
        inputs = self.folder / "inputs"
        python = str(self.trainer_env / "bin" / "python")
        command = [python, "-m", "local.tiny_model", str(inputs)]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the tiny model could not be made:\n{done.stderr[-2000:]}")
        for path in sorted((inputs / "model").iterdir()):
            bucket.put_object_from_file(f"models/tiny-qwen2/{path.name}", str(path))
        for name in ("sums.jsonl", "sums-eval.jsonl"):
            bucket.put_object_from_file(f"datasets/{name}", str(inputs / name))

    def stop(self) -> None:
        """Ends Airflow, the trainings on the nodes, the nodes and the OSS server, in this order."""
        if self.airflow is not None:
            self.airflow.stop()
        self.stop_jobs()
        for node in self.nodes:
            node.stop()
        if self.oss_process is not None:
            end(self.oss_process)
            self.oss_process = None
        self.end_leftovers()

    def stop_jobs(self) -> None:
        """Asks the supervisors of all jobs on the local nodes to end them, and waits until they have."""
        for workdir in sorted((self.folder / "nodes").glob("*/workdir")):
            for state in sorted(workdir.glob("jobs/*/state.json")):
                request = {
                    "workdir": str(workdir),
                    "job_id": state.parent.name,
                    "reason": "local cluster ends",
                    "wait_s": 45.0,
                }
                with contextlib.suppress(subprocess.TimeoutExpired):
                    subprocess.run(
                        [sys.executable, "-m", "trainer", "stop"],
                        input=json.dumps(request).encode(),
                        capture_output=True,
                        cwd=PROJECT,
                        timeout=60,
                        check=False,
                    )

    def end_leftovers(self) -> None:
        """Ends what carries this folder's mark or serves one of its nodes, whoever started it."""
        leftovers = set(descendants_marked(MARK, f"{self.folder}"))
        for config in self.folder.glob("nodes/*/sshd_config"):
            leftovers |= set(_pids_with_argument(str(config)))
        groups = set()
        for pid in leftovers:
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(pid))
        for group in groups - {os.getpgrp()}:
            end_group(group)


def _pids_with_argument(argument: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if argument.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found
