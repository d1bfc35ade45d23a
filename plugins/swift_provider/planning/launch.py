"""Launch plan + where the inputs lie → what each node's agent is asked to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from swift_provider.planning.engines import choose
from swift_provider.planning.environment import GPU_VARIABLES, activated, contained
from swift_provider.planning.inputs import resolve_inputs, split_inputs
from swift_provider.planning.plan import LaunchPlan, NodePlan
from trainer.protocol import JobSpec, Owner

ARGUMENTS_FILE = "swift.yaml"
#: ms-swift's two programs as modules: a file as the first argument and torchrun's variables work for both.
MODULES = {"swift": "swift.cli.main", "megatron": "swift.cli._megatron.main"}


@dataclass(frozen=True)
class Resume:
    """A checkpoint of the same run to go on from: its folder's name, its step, and small files each node must have."""

    name: str
    step: int
    files: dict[str, str] = field(default_factory=dict)


def job_spec(
    plan: LaunchPlan,
    node: NodePlan,
    *,
    job_id: str,
    owner: Owner,
    staged: Mapping[str, str],
    resume: Resume | None = None,
    deadline: float | None = None,
) -> JobSpec:
    """The job of one node: ms-swift's own CLI with the five variables that make it start torchrun.

    Args:
        plan: of the run.
        node: one of its nodes.
        job_id: the same on all nodes of a generation.
        owner: who the lease belongs to.
        staged: location → path on this node.
        resume: a complete checkpoint of this run; wins over the one that the recipe begins from.
        deadline: seconds since the epoch after which the supervisor itself ends the job.
    """
    job_dir = f"{node.workdir}/jobs/{job_id}"
    args = resolve_inputs(plan.args, staged)
    if resume:
        args = choose(plan.command, args).resume(args, f"{node.output_dir}/{resume.name}")
    args["output_dir"] = node.output_dir
    args = {name: _in_job_dir(value, job_dir) for name, value in args.items()}
    program, method = plan.program
    env = {**plan.env, **torchrun_environment(plan, node)}
    argv = [plan.python, "-m", MODULES[program], method, f"{job_dir}/{ARGUMENTS_FILE}"]
    return JobSpec(
        job_id=job_id,
        argv=_in_environment(argv, plan, node, job_id, split_inputs(args)[0], env),
        env=env,
        files={**plan.files, ARGUMENTS_FILE: yaml.safe_dump(args, allow_unicode=True, sort_keys=True)},
        output_dir=node.output_dir,
        world_size=plan.world_size,
        owner=owner,
        grace_s=plan.grace,
        deadline=deadline,
        gpus=node.gpus,
        port=plan.master_port if node.rank == 0 and len(plan.nodes) > 1 else None,
        resume_files=dict(resume.files) if resume else {},
    )


def _in_environment(
    argv: list[str], plan: LaunchPlan, node: NodePlan, job_id: str, inputs: list[str], env: Mapping[str, str]
) -> list[str]:
    argv = activated(argv, plan.activate)
    if plan.docker is None:
        return argv
    root = node.output_dir.rsplit("/runs/", 1)[0]  # shared_dir, where there is one
    return contained(
        argv,
        plan.docker,
        name=job_id.lstrip("_"),  # a container's name begins with a letter or digit
        workdir=f"{node.workdir}/jobs/{job_id}",
        folders=dict.fromkeys([node.workdir, root]),
        inputs=inputs,
        variables=[*env, *(GPU_VARIABLES if node.gpus is not None else ())],
        device=plan.device,
    )


def torchrun_environment(plan: LaunchPlan, node: NodePlan) -> dict[str, str]:
    """The variables from which ms-swift's CLI builds its torchrun command line; one node needs no rendezvous."""
    environment = {"NPROC_PER_NODE": str(node.slots)}
    if len(plan.nodes) > 1:
        environment |= {"NNODES": str(len(plan.nodes)), "NODE_RANK": str(node.rank), "MASTER_ADDR": plan.master_address}
    return environment | {"MASTER_PORT": str(plan.master_port)}


def _in_job_dir(value: Any, job_dir: str) -> Any:
    if isinstance(value, str):
        return value.replace("{job_dir}", job_dir)
    if isinstance(value, list):
        return [_in_job_dir(item, job_dir) for item in value]
    return value
