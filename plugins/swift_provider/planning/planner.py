"""Recipe + cluster + parameters of a run → launch plan."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift_provider.config.cluster import Cluster, Node
from swift_provider.config.errors import ConfigError, Fault, shorten
from swift_provider.config.recipe import Recipe
from swift_provider.planning.engines import apply_engine
from swift_provider.planning.inputs import split_inputs
from swift_provider.planning.names import run_key
from swift_provider.planning.params import check_params, override_args
from swift_provider.planning.plan import LaunchPlan, NodePlan

#: ms-swift 4.6 accumulates until a global batch of about 16 samples when nothing is said.
DEFAULT_GLOBAL_BATCH = 16
LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # noqa: S104 - refused, not bound


def make_plan(
    recipe: Recipe,
    cluster: Cluster,
    *,
    dag_id: str,
    run_id: str,
    params: Mapping[str, Any] | None = None,
    hosts: Mapping[str, str] | None = None,
    config_dir: Path | None = None,
) -> LaunchPlan:
    """The launch plan of one run.

    Args:
        recipe: what to train.
        cluster: where.
        dag_id: of the run.
        run_id: of the run.
        params: what this run changes; ``None`` values mean "as the recipe says".
        hosts: for each ``ssh_conn_id`` the host of the connection: the address of a node that names none.
        config_dir: where ``deepspeed/*.json`` lies.

    Raises:
        ConfigError: with every reason why this cannot run.
    """
    params = params or {}
    shown = f"recipes/{recipe.name}.yaml"
    faults = check_params(params, [node.name for node in cluster.nodes], recipe.name)
    args = {name: value for name, value in override_args(recipe.swift.args, params).items() if value is not None}
    files: dict[str, str] = {}
    faults += _ship_deepspeed_config(args, files, config_dir, shown)
    faults += apply_engine(args, files, cluster.device, shown)
    chosen = _choose_nodes(cluster, params.get("nodes"))
    key = run_key(dag_id, run_id)
    nodes = [_plan_node(cluster, node, rank, key, hosts or {}) for rank, node in enumerate(chosen)]
    if len(nodes) > 1:
        faults += _check_addresses(nodes, f"clusters/{cluster.name}.yaml")
    world_size = sum(node.slots for node in nodes)
    micro, accumulation, batch_faults = _batch(args, world_size, shown)
    faults += batch_faults
    if faults:
        raise ConfigError(faults)
    inputs, hub_ids = split_inputs(args)
    if args["model"] in inputs:
        args.setdefault("check_model", False)  # it is here; asking a hub for it costs retries and fails offline
    policy = recipe.checkpoints
    if params.get("keep_last") is not None:
        policy = policy.model_copy(update={"keep_last": params["keep_last"]})
    args |= {
        "output_dir": nodes[0].output_dir,
        "add_version": False,
        "save_on_each_node": cluster.shared_dir is None and len(nodes) > 1,
    }
    return LaunchPlan(
        dag_id=dag_id,
        run_id=run_id,
        run_key=key,
        recipe=recipe.name,
        recipe_hash=recipe.digest(),
        cluster=cluster.name,
        command=recipe.swift.command,
        device=cluster.device,
        python=cluster.python,
        nodes=nodes,
        master_port=cluster.master_port,
        shared=cluster.shared_dir is not None,
        world_size=world_size,
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=micro * accumulation * world_size,
        args=args,
        env=_environment(cluster, recipe),
        files=files,
        inputs=inputs,
        hub_ids=hub_ids,
        min_free_bytes=int(cluster.min_free_gib * 2**30),
        checkpoints=policy,
        max_runtime=recipe.max_runtime,
        grace=recipe.grace,
        dry_run=bool(params.get("dry_run")),
        prune_dry_run=bool(params.get("prune_dry_run")),
    )


def _choose_nodes(cluster: Cluster, wanted: list[str] | None) -> list[Node]:
    return [node for node in cluster.nodes if not wanted or node.name in wanted] or cluster.nodes


def _plan_node(cluster: Cluster, node: Node, rank: int, key: str, hosts: Mapping[str, str]) -> NodePlan:
    workdir = cluster.workdir_of(node)
    root = cluster.shared_dir or workdir
    return NodePlan(
        name=node.name,
        ssh_conn_id=node.ssh_conn_id,
        address=node.address or hosts.get(node.ssh_conn_id) or "",
        rank=rank,
        slots=node.slots,
        gpus=node.gpus,
        workdir=workdir,
        output_dir=f"{root}/runs/{key}/output",
    )


def _check_addresses(nodes: list[NodePlan], shown: str) -> list[Fault]:
    faults = []
    for node in nodes:
        if not node.address:
            problem = f"node {node.name} has no address and its connection {node.ssh_conn_id} no host; add one"
            faults.append(Fault(shown, "nodes.address", problem))
        elif node.address in LOOPBACK:
            problem = (
                f"node {node.name}: the other nodes cannot reach {node.address}; give its address in their network"
            )
            faults.append(Fault(shown, "nodes.address", problem))
    uneven = sorted({node.slots for node in nodes})
    if len(uneven) > 1:
        problem = f"nodes have {uneven} slots; torchrun needs the same number on each: choose nodes or lower the slots"
        faults.append(Fault(shown, "nodes.slots", problem))
    return faults


def _batch(args: Mapping[str, Any], world_size: int, shown: str) -> tuple[int, int, list[Fault]]:
    faults = []
    values = {}
    for name, default in (("per_device_train_batch_size", 1), ("gradient_accumulation_steps", None)):
        value = args.get(name, default)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            faults.append(
                Fault(shown, f"swift.args.{name}", f"must be a whole number from 1 on (got {shorten(value)})")
            )
            value = None
        values[name] = value
    micro = values["per_device_train_batch_size"] or 1
    accumulation = values["gradient_accumulation_steps"] or math.ceil(DEFAULT_GLOBAL_BATCH / micro / world_size)
    return micro, accumulation, faults


def _ship_deepspeed_config(
    args: dict[str, Any], files: dict[str, str], config_dir: Path | None, shown: str
) -> list[Fault]:
    value = args.get("deepspeed")
    if not isinstance(value, str) or not value.endswith(".json") or value.startswith("/"):
        return []
    path = (config_dir / "deepspeed" / value) if config_dir else None
    if path is None or Path(value).name != value or not path.is_file():
        there = sorted(found.name for found in (config_dir / "deepspeed").glob("*.json")) if config_dir else []
        problem = f"no such file in include/configs/deepspeed (got {shorten(value)}); there are: {', '.join(there)}"
        return [Fault(shown, "swift.args.deepspeed", problem)]
    text = path.read_text(encoding="utf-8")
    try:
        json.loads(text)
    except ValueError as error:
        return [Fault(f"deepspeed/{value}", "", f"is not JSON: {error}")]
    files["deepspeed.json"] = text
    args["deepspeed"] = "{job_dir}/deepspeed.json"
    return []


def _environment(cluster: Cluster, recipe: Recipe) -> dict[str, str]:
    environment = {"PYTHONUNBUFFERED": "1", **cluster.env, **recipe.swift.env}
    if cluster.device == "cpu":
        environment.setdefault("DS_ACCELERATOR", "cpu")
    return environment
