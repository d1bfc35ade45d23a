"""``make demo``: one nightly retraining, for real, on this machine, from nothing to a pruned bucket.

Airflow with its API server, scheduler and triggerer; two nodes reached over SSH; ms-swift with DeepSpeed ZeRO-3 across
both; checkpoints in a bucket that speaks the OSS protocol. Ctrl-C ends everything that was started.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from local.airflow import AirflowClient
from local.laptop import BUCKET, PROJECT, Laptop

TASKS = ("plan", "preflight", "stage", "train", "backup", "prune")
DAG_ID = "swift_train"
COLORS = {"success": "green", "failed": "red", "deferred": "magenta", "running": "cyan", "upstream_failed": "red"}

console = Console()


def view(tasks: dict[str, dict[str, Any]], progress: dict[str, Any] | None, started: float) -> Group:
    """What the terminal shows while the run goes on."""
    table = Table(box=None, pad_edge=False)
    table.add_column("task", width=12)
    table.add_column("state", width=16)
    table.add_column("seconds", justify="right")
    for task in TASKS:
        item = tasks.get(task, {})
        state = item.get("state") or "waiting"
        duration = item.get("duration")
        seconds = f"{duration:.0f}" if duration is not None else ""
        table.add_row(task, Text(state, style=COLORS.get(state, "dim")), seconds)
    line = Text(f"{time.monotonic() - started:4.0f} s  ", style="dim")
    line.append(progress_text(progress), style="bold")
    nodes = ", ".join(f"{name} {node['phase']}" for name, node in ((progress or {}).get("nodes") or {}).items())
    return Group(table, line, Text(nodes, style="dim"))


def progress_text(progress: dict[str, Any] | None) -> str:
    """Step, loss and time left, in one line; empty before the first step."""
    step = (progress or {}).get("progress") or {}
    if not step:
        return ""
    loss = f"  loss {step['loss']:.3f}" if step.get("loss") is not None else ""
    eta = f"  ETA {step['remaining_s']:.0f} s" if step.get("remaining_s") is not None else ""
    return f"step {step['step']}/{step['max_steps']}{loss}{eta}"


def follow(client: AirflowClient, run_id: str) -> str:
    """Shows the run until it has ended, live in a terminal, else a line for each change; returns its state."""
    started = time.monotonic()
    progress: dict[str, Any] | None = None
    said: set[str] = set()
    with Live(console=console, refresh_per_second=2) if console.is_terminal else nullcontext() as live:
        while True:
            tasks = client.task_instances(DAG_ID, run_id)
            progress = client.xcom(DAG_ID, run_id, "train", "progress") or progress
            if live is not None:
                live.update(view(tasks, progress, started))
            else:
                lines = [f"{task} {tasks[task]['state']}" for task in TASKS if task in tasks and tasks[task]["state"]]
                for line in [*lines, progress_text(progress)]:
                    if line and line not in said:
                        console.print(f"{time.monotonic() - started:4.0f} s  {line}", highlight=False)
                        said.add(line)
            state = client.run_state(DAG_ID, run_id)
            if state in ("success", "failed"):
                return state
            time.sleep(1.5)


def bucket_tree(laptop: Laptop) -> Tree:
    """What the bucket holds, with sizes; checkpoints with what their manifests say."""
    from trainer.store import list_manifests

    tree = Tree(f"oss://{BUCKET}")
    for manifest in list_manifests(laptop.oss_target("checkpoints")):
        shown = {name: manifest.metrics[name] for name in ("loss", "eval_loss") if name in manifest.metrics}
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
        title = f"{manifest.dag_id} / {manifest.run_id} / [bold]{manifest.name}[/bold]  {manifest.total_bytes:,} bytes"
        branch = tree.add(f"{title}  manifest: {len(manifest.files)} files, {manifest.format}, {metrics}")
        for file in manifest.files:
            branch.add(f"{file.path}  [dim]{file.size:,} bytes, crc64 {file.crc64}, from {file.node}[/dim]")
    return tree


def summarize(laptop: Laptop, client: AirflowClient, run_id: str) -> None:
    """The bucket, and what was pruned and why."""
    console.print(bucket_tree(laptop))
    pruned = client.xcom(DAG_ID, run_id, "prune") or {}
    table = Table("where", "checkpoint", "decision", "reason", title="Pruning", title_justify="left", box=None)
    for where, decisions in pruned.items():
        for decision in decisions:
            style = "green" if decision["keep"] else "yellow"
            word = "kept" if decision["keep"] else "deleted"
            table.add_row(where, decision["name"], Text(word, style=style), decision["reason"])
    console.print(table)


def show_failure(client: AirflowClient, run_id: str) -> None:
    """The end of the log of each failed task."""
    for task_id, item in client.task_instances(DAG_ID, run_id).items():
        if item["state"] == "failed":
            log = client.task_log(DAG_ID, run_id, task_id, item["try_number"])
            console.print(Panel("\n".join(log.splitlines()[-40:]), title=f"{task_id} failed", border_style="red"))


def run_demo(laptop: Laptop, keep: bool) -> int:
    """The whole demo; returns the exit status."""
    started = time.monotonic()
    console.print(f"starting two nodes, an OSS server and Airflow in {laptop.folder}")
    laptop.start_servers()
    with ThreadPoolExecutor() as pool:
        inputs = pool.submit(laptop.put_inputs)
        airflow = laptop.start_airflow()
        inputs.result()
    client = airflow.client()
    client.wait_for_dag(DAG_ID)
    console.print(f"Airflow is up after {time.monotonic() - started:.0f} s: {airflow.url}")
    run_id = f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    client.trigger(DAG_ID, run_id, {"recipe": "tiny-cpu"})
    console.print(f"POST /api/v2/dags/{DAG_ID}/dagRuns → run [bold]{run_id}[/bold]")
    try:
        state = follow(client, run_id)
    except KeyboardInterrupt:
        client.set_run_state(DAG_ID, run_id, "failed")
        raise
    if state != "success":
        show_failure(client, run_id)
    else:
        summarize(laptop, client, run_id)
    console.print(
        Panel(
            f"run {run_id}: [bold]{state}[/bold] in {time.monotonic() - started:.0f} s\n"
            f"UI: {airflow.url}/dags/{DAG_ID}/runs/{run_id}   user admin, password {airflow.password}\n"
            + ("Airflow stays up; `make stop` ends it." if keep else "`make demo KEEP=1` leaves Airflow up."),
            border_style="green" if state == "success" else "red",
        )
    )
    return 0 if state == "success" else 1


def main() -> int:
    """Entry point of ``python -m local.demo``."""
    parser = argparse.ArgumentParser(prog="python -m local.demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=PROJECT / ".local-run", help="where everything lives")
    parser.add_argument("--keep", action="store_true", help="leave Airflow, the nodes and the bucket up at the end")
    parser.add_argument("--stop", action="store_true", help="end what an earlier run left up")
    options = parser.parse_args()
    laptop = Laptop(options.folder, say=lambda text: console.print(text, style="yellow"))
    if options.stop:
        laptop.stop()
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    status = 1
    try:
        status = run_demo(laptop, options.keep)
    except KeyboardInterrupt:
        console.print("\ninterrupted: ending everything that was started")
        status = 130
    finally:
        if not (options.keep and status == 0):
            laptop.stop()
    return status


if __name__ == "__main__":
    sys.exit(main())
