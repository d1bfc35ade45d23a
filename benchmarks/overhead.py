"""What orchestration costs: the whole run through Airflow, against the same training started by hand over plain ssh.

Both train the same tiny model on the same two loopback nodes with the same ms-swift arguments and environment, which
are read back from the job that Airflow started. The training by hand knows no checks, leases, backup or pruning.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, run_cases
from local.airflow import AirflowClient
from local.laptop import Laptop
from local.nodes import LocalNode

DAG_ID = "swift_train"
TASKS = ("plan", "preflight", "stage", "train", "backup", "prune")
LIMIT_S = 600.0


def through_airflow(client: AirflowClient, run_id: str) -> tuple[float, dict[str, float]]:
    """Seconds from the trigger to the end of the run, and of each task."""
    began = time.monotonic()
    client.trigger(DAG_ID, run_id, {"recipe": "tiny-cpu"})
    while (state := client.run_state(DAG_ID, run_id)) not in ("success", "failed"):
        if time.monotonic() - began > LIMIT_S:
            raise TimeoutError(f"run {run_id} is still {state} after {LIMIT_S:g} s")
        time.sleep(0.5)
    seconds = time.monotonic() - began
    tasks = client.task_instances(DAG_ID, run_id)
    if state != "success":
        raise RuntimeError(
            f"run {run_id} failed: " + ", ".join(f"{name} {item['state']}" for name, item in tasks.items())
        )
    return seconds, {name: float(tasks[name]["duration"] or 0.0) for name in TASKS}


def by_hand(laptop: Laptop, folder: Path) -> float:
    """Seconds of the same training over two ``ssh`` commands, from their start to the end of both."""
    known_hosts = folder / "known_hosts"
    lines = [f"[{node.address}]:{node.port} {node.host_key}\n" for node in laptop.nodes]
    known_hosts.write_text("".join(lines))
    commands = [ssh_command(node, known_hosts, by_hand_command(node, folder)) for node in laptop.nodes]
    began = time.monotonic()
    running = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    seconds = time.monotonic() - began
    for process, output in zip(running, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(
                f"training by hand: status {process.returncode}\n{output[-3000:].decode(errors='replace')}"
            )
    return seconds


def by_hand_command(node: LocalNode, folder: Path) -> list[str]:
    """The command of the job that Airflow started on ``node``, with an output folder of its own."""
    job = next(path.parent for path in sorted(node.workdir.glob("jobs/*/spec.json")))
    spec: dict[str, Any] = json.loads((job / "spec.json").read_text())
    copy = folder / node.name
    shutil.copytree(job, copy)
    output = re.escape(spec["output_dir"])
    for path in copy.glob("*.yaml"):
        text = path.read_text().replace(str(job), str(copy))
        path.write_text(re.sub(output, str(folder / "output"), text))
    argv = [word.replace("{job_dir}", str(copy)).replace(str(job), str(copy)) for word in spec["argv"]]
    environment = [f"{name}={value.replace('{job_dir}', str(copy))}" for name, value in spec["env"].items()]
    return ["env", *environment, *argv]


def ssh_command(node: LocalNode, known_hosts: Path, argv: list[str]) -> list[str]:
    """OpenSSH's client, with nothing of the user's own configuration."""
    options = {
        "UserKnownHostsFile": str(known_hosts),
        "IdentityFile": str(node.client_key),
        "IdentitiesOnly": "yes",
        "BatchMode": "yes",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    target = ["-p", str(node.port), f"{node.user}@{node.address}"]
    return ["ssh", "-F", "/dev/null", *words, *target, shlex.join(argv)]


def overhead() -> list[Row]:
    """One run of each after a first one that fills all caches."""
    if shutil.which("ssh") is None:
        raise SystemExit("the peer needs OpenSSH's client: apt-get install openssh-client")
    with tempfile.TemporaryDirectory(prefix="swift-bench-", ignore_cleanup_errors=True) as name:
        laptop = Laptop(Path(name) / "laptop", say=lambda text: print(text, file=sys.stderr))
        try:
            laptop.start_servers()
            laptop.put_inputs()
            client = laptop.start_airflow().client()
            client.wait_for_dag(DAG_ID)
            through_airflow(client, "warm-up")
            seconds, tasks = through_airflow(client, "measured")
            hand = Path(name) / "by-hand"
            hand.mkdir()
            peer = by_hand(laptop, hand)
        finally:
            laptop.stop()
    between = seconds - sum(tasks.values())
    rows = [Row("whole run, trigger to end", seconds, peer, note="peer: two ssh commands, training alone")]
    rows += [Row(f"  {task}", tasks[task], peer if task == "train" else None) for task in TASKS]
    return [*rows, Row("  between the tasks (scheduler)", between)]


if __name__ == "__main__":
    sys.exit(run_cases("benchmarks.overhead", {"overhead": overhead}, __doc__ or ""))
