"""``swift-provider checkpoints``: what is in the bucket, whether it is whole, what must stay, and getting it back."""

from __future__ import annotations

import getpass
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from swift_provider.cli.connection import target_for
from swift_provider.cli.files import find_files, read
from swift_provider.cli.output import err, fail, out, print_table
from swift_provider.config.checkpoints import KeepBest, Storage
from swift_provider.planning.choosing import Stored, choose, existing
from swift_provider.settings import config_dir
from trainer.protocol import FetchRequest, OssTarget
from trainer.store import Folder, StoreError, pin, survey, unpin, verify, verify_bytes
from trainer.transfer import fetch

app = typer.Typer(help="Checkpoints in the bucket.", no_args_is_help=True)

PlaceArgument = Annotated[str, typer.Argument(metavar="PLACE", help="A recipe, or oss://bucket/prefix.")]
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="latest, best, checkpoint-8 or RUN/checkpoint-8.")
]
Connection = Annotated[str | None, typer.Option("--connection", help="Airflow connection. Default: the recipe's.")]
ConfigDir = Annotated[Path | None, typer.Option("--config", help="Folder with recipes/. Default: that of Airflow.")]


@dataclass(frozen=True)
class Place:
    """Where to look. ``recipe`` limits it to one recipe's checkpoints; ``best`` says which one is the best."""

    target: OssTarget
    recipe: str = ""
    best: KeepBest | None = None

    def __str__(self) -> str:
        return self.target.url + (f", recipe {self.recipe}" if self.recipe else "")

    def folders(self) -> list[Folder]:
        """All checkpoint folders there, with and without a manifest."""
        return survey(self.target)

    def one(self, wanted: str) -> Stored:
        """The checkpoint that ``wanted`` means.

        Raises:
            ValueError: nothing, or more than one thing, is meant.
        """
        return choose(existing(self.folders(), self.recipe), wanted, self.best)

    def of(self, stored: Stored) -> OssTarget:
        """The place of one checkpoint."""
        return replace(self.target, prefix=stored.prefix)


@app.command("list")
def list_checkpoints(
    place: PlaceArgument,
    connection: Connection = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")] = False,
    config: ConfigDir = None,
) -> None:
    """List what exists: only what has a manifest."""
    with _faults():
        where = _place(place, connection, config)
        folders = where.folders()
        stored = existing(folders, where.recipe)
        if as_json:
            for item in stored:
                sys.stdout.write(json.dumps(_row(where, item), ensure_ascii=False) + "\n")
        elif stored:
            print_table(_table(where, stored))
        for folder in folders:
            if folder.error:
                err(folder.error)
        if not stored:
            fail(f"{where}: no checkpoint has a manifest")


@app.command("verify")
def verify_checkpoints(
    place: PlaceArgument,
    checkpoints: Annotated[
        list[str] | None, typer.Argument(metavar="[CHECKPOINT]...", help="As for restore. Default: all.")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte, instead of asking for each CRC64.")] = False,
    connection: Connection = None,
    config: ConfigDir = None,
) -> None:
    """Compare objects with their manifests; the exit status is 1 when one differs."""
    with _faults():
        where = _place(place, connection, config)
        folders = where.folders()
        stored = existing(folders, where.recipe)
        unreadable = [folder.error for folder in folders if folder.error and not checkpoints]
        for text in unreadable:
            err(text)
        broken = len(unreadable)
        chosen = [choose(stored, wanted, where.best) for wanted in checkpoints] if checkpoints else stored
        for item in chosen:
            target = where.of(item)
            wrong = (verify_bytes if deep else verify)(target, item.manifest)
            for path, text in sorted(wrong.items()):
                err(f"{target.url}/{path}: {text}")
            broken += bool(wrong)
            if not wrong:
                how = "every byte read" if deep else "size and CRC64 of each object"
                out(f"{item.name}: fine, {len(item.manifest.files)} objects, {size(item.manifest.total_bytes)}, {how}")
        if broken or not chosen:
            every = len(chosen) + len(unreadable)
            fail(f"{broken} of {every} damaged" if broken else f"{where}: no checkpoint has a manifest")


@app.command("pin")
def pin_checkpoint(
    place: PlaceArgument,
    checkpoint: CheckpointArgument,
    reason: Annotated[str, typer.Option(help="For whoever wonders why it is still there.")] = "",
    connection: Connection = None,
    config: ConfigDir = None,
) -> None:
    """Keep a checkpoint whatever a policy says, on the nodes and in the bucket."""
    with _faults():
        where = _place(place, connection, config)
        item = where.one(checkpoint)
        pin(where.of(item), {"by": getpass.getuser(), "at": datetime.now(UTC).isoformat("T", "seconds"), "why": reason})
        out(f"{item.name}: pinned")


@app.command("unpin")
def unpin_checkpoint(
    place: PlaceArgument, checkpoint: CheckpointArgument, connection: Connection = None, config: ConfigDir = None
) -> None:
    """Let the policy decide again."""
    with _faults():
        where = _place(place, connection, config)
        item = where.one(checkpoint)
        out(f"{item.name}: {'unpinned' if unpin(where.of(item)) else 'was not pinned'}")


@app.command("restore")
def restore(
    place: PlaceArgument,
    checkpoint: CheckpointArgument,
    to: Annotated[str, typer.Option("--to", help="Folder that the checkpoint's own folder is made in.")] = ".",
    cluster: Annotated[str | None, typer.Option(help="On the nodes of this cluster, by the DAG swift_restore.")] = None,
    node: Annotated[list[str] | None, typer.Option(help="Only this node of the cluster; may be repeated.")] = None,
    connection: Connection = None,
    config: ConfigDir = None,
) -> None:
    """Bring a checkpoint back, verified; it appears at once and whole. What was interrupted goes on."""
    with _faults():
        where = _place(place, connection, config)
        item = where.one(checkpoint)
        if cluster is not None:
            _trigger(where.of(item).url, connection or _conn_id(place, config), cluster, node or [], to)
            return
        began = time.monotonic()
        reply = fetch(FetchRequest(where.of(item), str((Path(to) / item.manifest.name).absolute())))
        if reply.error:
            fail(reply.error)
        took = time.monotonic() - began
        out(f"{reply.path}: {reply.files} files, {size(reply.size)}, each proven by its CRC64, in {took:.1f} s")


# -- places ---------------------------------------------------------------------------------------------------------


def _place(place: str, connection: str | None, config: Path | None) -> Place:
    if "://" in place:
        return Place(target_for(place.rstrip("/"), connection or "oss_default"))
    recipe = _recipe(place, config)
    policy = recipe.checkpoints
    if policy.backup is None:
        fail(f"recipe {recipe.name} has no checkpoints.backup: nothing of it is in a bucket")
    target = target_for(policy.backup, connection or policy.oss_conn_id, policy.storage or Storage())
    return Place(target, recipe.name, policy.keep_best)


def _recipe(name: str, config: Path | None) -> Any:
    found = [file for file in find_files([name], config or config_dir()) if file.kind == "recipes"]
    if not found:
        fail(f"{name}: is a cluster; name a recipe, or write oss://bucket/prefix")
    return read(found[0])


def _conn_id(place: str, config: Path | None) -> str:
    return "oss_default" if "://" in place else str(_recipe(place, config).checkpoints.oss_conn_id)


def _trigger(url: str, conn_id: str, cluster: str, nodes: list[str], target: str) -> None:
    """Start the DAG: only Airflow has the keys of the nodes."""
    command = shutil.which("airflow")
    if command is None:
        fail(f"no airflow command here; trigger the DAG swift_restore with checkpoint {url} and cluster {cluster}")
    conf: dict[str, Any] = {"checkpoint": url, "oss_conn_id": conn_id, "cluster": cluster}
    conf |= {"nodes": nodes} if nodes else {}
    conf |= {"target": target} if target != "." else {}
    run_id = f"restore__{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
    done = subprocess.run(
        [command, "dags", "trigger", "swift_restore", "--run-id", run_id, "--conf", json.dumps(conf)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        fail(f"swift_restore was not triggered: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    out(f"run {run_id} of swift_restore brings {url} to {', '.join(nodes) or 'all nodes'} of {cluster}")


# -- showing --------------------------------------------------------------------------------------------------------


def _row(where: Place, item: Stored) -> dict[str, Any]:
    manifest = item.manifest
    return {
        "url": where.of(item).url,
        "dag_id": manifest.dag_id,
        "run_id": manifest.run_id,
        "recipe": manifest.recipe,
        "name": manifest.name,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "verdict": manifest.verdict,
        "format": manifest.format,
        "bytes": manifest.total_bytes,
        "metrics": manifest.metrics,
        "created_at": manifest.created_at,
        "pinned": item.pinned,
        "damaged": sorted(item.lacking),
    }


def _table(where: Place, stored: list[Stored]) -> Table:
    metric = where.best.metric if where.best else "eval_loss"
    columns = ("run", "checkpoint", "size", metric, "loss", "age", "what", "")
    table = Table(*columns, box=None, pad_edge=False)
    for item in stored:
        manifest = item.manifest
        marks = [word for word, is_so in (("pinned", item.pinned), ("DAMAGED", bool(item.lacking))) if is_so]
        cells = [manifest.run_id or item.run, manifest.name, size(manifest.total_bytes)]
        cells += [_number(manifest.metrics.get(metric)), _number(manifest.metrics.get("loss"))]
        cells += [age(time.time() - item.created) if item.created else "?"]
        cells += [f"{manifest.format}, {manifest.verdict.replace('_', ' ')}", ", ".join(marks)]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def age(seconds: float) -> str:
    """Seconds for people."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@contextmanager
def _faults() -> Iterator[None]:
    """What the bucket refuses, and what names nothing, is a sentence."""
    try:
        yield
    except (StoreError, ValueError) as error:
        fail(str(error))
