"""Recipe + cluster + parameters of a run → launch plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift_provider.config.cluster import Cluster, Node
from swift_provider.config.errors import ConfigError, Fault
from swift_provider.config.recipe import Recipe
from swift_provider.planning.arguments import check_arguments
from swift_provider.planning.catalogue import arguments_of
from swift_provider.planning.engines import Setting, choose, megatron
from swift_provider.planning.estimate import estimate
from swift_provider.planning.export import check_export
from swift_provider.planning.inputs import split_inputs
from swift_provider.planning.names import run_key
from swift_provider.planning.params import check_params, override_args
from swift_provider.planning.plan import LaunchPlan, NodePlan
from swift_provider.planning.selection import select_nodes
from swift_provider.planning.shape import shape_of

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
    model_config: Mapping[str, Any] | None = None,
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
        model_config: the model's ``config.json``, where it is at hand.

    Raises:
        ConfigError: with every reason why this cannot run.
    """
    params = params or {}
    command, shown = recipe.swift.command, f"recipes/{recipe.name}.yaml"
    faults = check_params(params, recipe)
    args = {name: value for name, value in override_args(recipe, params).items() if value is not None}
    for name, problem in check_arguments(command, args, arguments_of(command)).items():
        faults.append(Fault(shown, f"swift.args.{name}", problem))
    faults += check_export(recipe, args, shown)
    chosen, node_faults = select_nodes(cluster, params.get("nodes"), params.get("exclude"))
    faults += node_faults
    if not chosen:
        raise ConfigError(faults)  # all arithmetic is about nodes
    key = run_key(dag_id, run_id)
    nodes = [_plan_node(cluster, node, rank, key, hosts or {}) for rank, node in enumerate(chosen)]
    if len(nodes) > 1:
        faults += _check_addresses(nodes, f"clusters/{cluster.name}.yaml")
    setting = Setting(
        command=command,
        device=cluster.device,
        nodes=len(nodes),
        world_size=sum(node.slots for node in nodes),
        shared=cluster.shared_dir is not None,
        env=_environment(cluster, recipe),
        config_dir=config_dir,
        shape=shape_of(model_config) if model_config else None,
    )
    engine = choose(command, args)
    said = {fault.key for fault in faults}
    found = [finding for finding in engine.complete(args, setting) if finding.key not in said]
    faults += [
        Fault(f"clusters/{cluster.name}.yaml" if finding.cluster else shown, finding.key, finding.problem)
        for finding in found
        if not finding.warning
    ]
    if faults:
        raise ConfigError(faults)
    batch = engine.batch(args, setting.world_size)
    inputs, hub_ids = split_inputs(args)
    if args["model"] in inputs:
        args.setdefault("check_model", False)  # it is here; asking a hub for it costs retries and fails offline
    policy = recipe.checkpoints
    if params.get("keep_last") is not None:
        policy = policy.with_keep_last(params["keep_last"])
    args |= {"output_dir": nodes[0].output_dir, "add_version": False}
    if engine.NAME != megatron.NAME:  # whose ranks each write their own shards anyway
        args["save_on_each_node"] = not setting.shared and len(nodes) > 1
    plan = LaunchPlan(
        dag_id=dag_id,
        run_id=run_id,
        run_key=key,
        recipe=recipe.name,
        recipe_hash=recipe.digest(),
        cluster=cluster.name,
        command=command,
        device=cluster.device,
        python=cluster.python,
        activate=cluster.activate,
        docker=cluster.docker,
        nodes=nodes,
        master_port=cluster.master_port,
        shared=setting.shared,
        engine=engine.NAME,
        world_size=setting.world_size,
        data_parallel=batch.data_parallel,
        micro_batch=batch.micro,
        accumulation=batch.accumulation,
        global_batch=batch.size,
        args=args,
        env=dict(setting.env),
        files=setting.files,
        inputs=inputs,
        hub_ids=hub_ids,
        min_free_bytes=int(cluster.min_free_gib * 2**30),
        checkpoints=policy,
        export=recipe.export,
        max_runtime=recipe.max_runtime,
        grace=recipe.grace,
        dry_run=bool(params.get("dry_run")),
        prune_dry_run=bool(params.get("prune_dry_run")),
        warnings=[f"{finding.key}: {finding.problem}" for finding in found if finding.warning]
        + check_tuning(recipe, batch.size),
    )
    return plan.model_copy(update={"memory": estimate(plan, model_config)}) if model_config else plan


def check_tuning(recipe: Recipe, global_batch: int) -> list[str]:
    """What another global batch means for a learning rate; with Adam it grows like the batch's square root.

    Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms".
    """
    tuned, name = recipe.tuned_global_batch, "lr" if recipe.swift.command.startswith("megatron") else "learning_rate"
    if tuned is None or tuned == global_batch:
        return []
    text = f"tuned_global_batch: {name} was tuned for a global batch of {tuned}, and this run has {global_batch}"
    try:
        rate = float(recipe.swift.args[name])
    except (KeyError, TypeError, ValueError):
        return [f"{text}; set the accumulation or the nodes so that they agree"]
    return [f"{text}; with Adam {rate * math.sqrt(global_batch / tuned):.3g} would correspond to {rate:g}"]


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


def _environment(cluster: Cluster, recipe: Recipe) -> dict[str, str]:
    network = cluster.network.environment() if cluster.network else {}
    environment = {"PYTHONUNBUFFERED": "1", **network, **cluster.env, **recipe.swift.env}
    if cluster.device == "cpu":
        environment.setdefault("DS_ACCELERATOR", "cpu")
    return environment
