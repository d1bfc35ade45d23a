"""The commands. Answers go to stdout, notes and faults to stderr; the exit status is 1 when there are faults."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from swift_provider.cli import checkpoints
from swift_provider.cli.files import check_file, find_files, plan_of, read
from swift_provider.cli.output import err, fail, out
from swift_provider.cli.params import parse_params
from swift_provider.config import Cluster, ConfigError, Recipe
from swift_provider.config.loading import load_cluster
from swift_provider.importing.hostfile import import_hostfile
from swift_provider.importing.recipe import import_recipe
from swift_provider.planning.catalogue import PINNED_VERSION, arguments_of
from swift_provider.planning.forecast import forecast
from swift_provider.planning.params import model_of
from swift_provider.planning.renames import MEGATRON, SWIFT
from swift_provider.planning.shape import read_config
from swift_provider.settings import config_dir

app = typer.Typer(
    name="swift-provider",
    help="Check, plan and import recipes and clusters, with the code that the DAGs use.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
args_app = typer.Typer(help="ms-swift's arguments.", no_args_is_help=True)
hostfile_app = typer.Typer(help="DeepSpeed hostfiles.", no_args_is_help=True)
recipe_app = typer.Typer(help="Recipes.", no_args_is_help=True)
app.add_typer(args_app, name="args")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(hostfile_app, name="hostfile")
app.add_typer(recipe_app, name="recipe")

RecipeName = Annotated[str, typer.Argument(help="Name or path of a recipe.")]
Parameters = Annotated[list[str] | None, typer.Option("--param", "-p", help="Parameter of the run, as name=value.")]
OtherCluster = Annotated[str | None, typer.Option("--cluster", help="Another cluster than the recipe's.")]
ConfigDir = Annotated[
    Path | None, typer.Option("--config", help="Folder with recipes/ and clusters/. Default: that of Airflow.")
]


def main() -> None:
    """Entry point: whatever goes wrong is a sentence on stderr, never a traceback."""
    try:
        app()
    except ConfigError as error:
        err(str(error))
        sys.exit(1)
    except UnicodeDecodeError:
        err("the file is not UTF-8 text")
        sys.exit(1)
    except OSError as error:
        err(f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "))
        sys.exit(1)


@app.command()
def validate(
    files: Annotated[
        list[str] | None, typer.Argument(help="Paths or names of recipes and clusters. Default: all.")
    ] = None,
    config: ConfigDir = None,
) -> None:
    """Check recipe and cluster files, and the plan of each recipe."""
    folder = config or config_dir()
    faults = 0
    found = find_files(files or [], folder)
    for file in found:
        try:
            check_file(file, folder)
        except ConfigError as error:
            faults += len(error.faults)
            for fault in error.faults:
                err(str(fault))
        else:
            out(f"{file.shown}: fine")
    if not found:
        err(f"no recipes and no clusters in {folder}")
    if faults or not found:
        raise typer.Exit(1)


@app.command()
def plan(
    recipe: RecipeName,
    param: Parameters = None,
    cluster: OtherCluster = None,
    config: ConfigDir = None,
) -> None:
    """Show what a run would do: nodes, batch, arguments, output."""
    loaded, where, params, folder = _inputs(recipe, param, cluster, config)
    made = plan_of(loaded, where, params, folder)
    told = forecast(made, loaded, where, read_config(model_of(loaded, params)))
    out("\n".join([made.describe(), *told.lines]))


@app.command()
def preflight(
    recipe: RecipeName,
    param: Parameters = None,
    cluster: OtherCluster = None,
    config: ConfigDir = None,
) -> None:
    """Look at every node as a run would before it trains, and start nothing."""
    from swift_provider.cli.preflight import run_preflight, show  # Airflow's connections: seconds to import

    found = run_preflight(*_inputs(recipe, param, cluster, config))
    show(found)
    if found.faults:
        fail(f"{len(found.faults)} faults on the nodes")


def _inputs(
    recipe: str, param: list[str] | None, cluster: str | None, config: Path | None
) -> tuple[Recipe, Cluster, dict[str, Any], Path]:
    """Recipe, cluster, parameters and folder that a command line means."""
    folder = config or config_dir()
    recipes = [file for file in find_files([recipe], folder) if file.kind == "recipes"]
    if not recipes:
        fail(f"{recipe}: is a cluster; name a recipe")
    loaded = read(recipes[0])
    return loaded, load_cluster(cluster or loaded.cluster, folder), parse_params(param or [], loaded), folder


@args_app.command("search", context_settings={"ignore_unknown_options": True})
def search_arguments(
    word: Annotated[str, typer.Argument(help="Part of a name, old names included.")],
    command: Annotated[str, typer.Option(help="sft, pt, rlhf, or 'megatron sft' and so on.")] = "sft",
) -> None:
    """Search the arguments of the pinned ms-swift."""
    try:
        known = arguments_of(command)
    except KeyError:
        fail(f"ms-swift {PINNED_VERSION} has no command {command!r}")
    wanted = word.lstrip("-").replace("-", "_").lower()
    found = {name: argument for name, argument in known.items() if wanted in name.lower()}
    table = Table("argument", "type", "default", "choices", box=None, pad_edge=False)
    for name, argument in sorted(found.items()):
        choices = argument.get("choices")
        default = argument.get("default")
        shown = default["expr"] if isinstance(default, dict) and set(default) == {"expr"} else default
        table.add_row(name, str(argument["type"]), str(shown), ", ".join(map(str, choices)) if choices else "")
    if found:
        Console(width=160, markup=False, highlight=False).print(table)
    old = {name: new for name, new in (MEGATRON if command.startswith("megatron") else SWIFT).items() if wanted in name}
    for name, new in sorted(old.items()):
        if name not in known:
            out(f"{name}: of older versions; " + (new if " " in new else f"is called {new} today"))
    if not found and not old:
        fail(f"ms-swift {PINNED_VERSION}: no argument of {command} holds {word!r}")


@hostfile_app.command("import")
def hostfile_import(
    file: Annotated[str, typer.Argument(help="A hostfile, or - for stdin.")],
    name: Annotated[str, typer.Option(help="Name of the cluster.")] = "cluster",
    python: Annotated[str, typer.Option(help="Interpreter of the training environment.")] = "/opt/swift/bin/python",
    ssh_conn_id: Annotated[str, typer.Option(help="Airflow connection; {host} stands for the host.")] = "{host}",
) -> None:
    """Print the cluster file that a DeepSpeed hostfile stands for."""
    try:
        text, notes = import_hostfile(_read(file), name=name, python=python, ssh_conn_id=ssh_conn_id)
    except ValueError as error:
        fail(f"{file}: {error}")
    out(text.rstrip("\n"))
    for note in notes:
        err(f"note: {note}")


@recipe_app.command("import")
def recipe_import(
    file: Annotated[str, typer.Argument(help="A script or command line in a file, or - for stdin.")] = "-",
    name: Annotated[str, typer.Option(help="Name of the recipe.")] = "imported",
    cluster: Annotated[str, typer.Option(help="Name of the cluster.")] = "one-gpu-node",
) -> None:
    """Print the recipe that a pasted swift, megatron, deepspeed or torchrun command stands for."""
    result = import_recipe(_read(file), name=name, cluster=cluster)
    out(result.yaml().rstrip("\n"))
    for note in result.notes:
        err(f"note: {note}")
    for fault in result.faults:
        err(f"FAULT: {fault}")
    if result.faults:
        raise typer.Exit(1)


def _read(file: str) -> str:
    return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
