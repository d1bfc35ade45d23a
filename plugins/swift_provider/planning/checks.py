"""Facts about nodes → what is wrong with them, each fault with its fix. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swift_provider.planning.plan import LaunchPlan, NodePlan
from trainer.protocol import Gpu, ProbeReply

#: OSS refuses requests that are 15 min off; log lines of nodes stop lining up long before.
MAX_CLOCK_SKEW_S = 5.0
#: A GPU that holds more than this before the start is in use by someone else (NVRx waits for 512 MB as well).
MAX_GPU_MEMORY_USED = 512 * 2**20
#: NCCL and data loaders share memory through /dev/shm; containers often have 64 MiB.
MIN_SHM_FREE = 2**30

OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class Check:
    """One line of the preflight table. ``level`` is ``ok``, ``warn`` or ``FAIL``; ``fix`` says what to do."""

    node: str
    name: str
    level: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class NodeFacts:
    """What one node answered. ``skew_s`` is its clock minus ours; ``reach_error`` concerns the rendezvous."""

    probe: ProbeReply
    skew_s: float = 0.0
    reach_error: str | None = None


def required_packages(plan: LaunchPlan) -> list[str]:
    """Distributions whose versions must be there and equal on all nodes."""
    names = ["torch", "ms-swift", "transformers", "oss2"]
    if plan.args.get("deepspeed"):
        names.append("deepspeed")
    return names


def check_nodes(plan: LaunchPlan, facts: Mapping[str, NodeFacts], errors: Mapping[str, str]) -> list[Check]:
    """Every check of every node.

    Args:
        plan: of the run.
        facts: answers, by node name.
        errors: why the other nodes did not answer, by node name.
    """
    checks = []
    for node in plan.nodes:
        if node.name in errors:
            checks.append(Check(node.name, "ssh", FAIL, "no answer", errors[node.name]))
            continue
        checks += _check_node(plan, node, facts[node.name])
    return checks + _check_equal(plan, facts)


def _check_node(plan: LaunchPlan, node: NodePlan, facts: NodeFacts) -> list[Check]:
    probe = facts.probe
    checks = [
        Check(node.name, "ssh", OK, f"{probe.hostname}, host key verified"),
        Check(node.name, "python", OK, f"{probe.python_version} {probe.python_path}"),
        *_check_folders(plan, node, probe),
        *_check_packages(plan, node, probe),
        *_check_gpus(plan, node, probe),
        _check_lease(plan, node, probe),
        _check_clock(node, facts.skew_s),
    ]
    if probe.shm_free is not None and plan.device == "gpu" and probe.shm_free < MIN_SHM_FREE:
        fix = "enlarge /dev/shm (docker: --shm-size 16g or --ipc host)"
        checks.append(Check(node.name, "shared memory", FAIL, f"{_gib(probe.shm_free)} free", fix))
    if len(plan.nodes) > 1:
        where = f"{plan.master_address}:{plan.master_port}"
        if facts.reach_error:
            fix = "free the port or open it between the nodes (firewall, security group), or set master_port / address"
            checks.append(Check(node.name, "rendezvous", FAIL, f"{where}: {facts.reach_error}", fix))
        else:
            checks.append(Check(node.name, "rendezvous", OK, where))
    return checks


def _check_folders(plan: LaunchPlan, node: NodePlan, probe: ProbeReply) -> list[Check]:
    checks = []
    if probe.workdir_error:
        fix = f"make {node.workdir} writable for the login user, or set workdir in the cluster file"
        checks.append(Check(node.name, "workdir", FAIL, probe.workdir_error, fix))
    else:
        checks.append(Check(node.name, "workdir", OK, node.workdir))
    if plan.shared and probe.shared_dir_error:
        checks.append(Check(node.name, "shared_dir", FAIL, probe.shared_dir_error, "mount the shared disk there"))
    free = probe.shared_disk_free if plan.shared else probe.disk_free
    if free is not None:
        level = OK if free >= plan.min_free_bytes else FAIL
        fix = "" if level == OK else f"free space up to {_gib(plan.min_free_bytes)} (min_free_gib in the cluster file)"
        checks.append(Check(node.name, "disk", level, f"{_gib(free)} free", fix))
    return checks


def _check_packages(plan: LaunchPlan, node: NodePlan, probe: ProbeReply) -> list[Check]:
    checks = []
    for package in required_packages(plan):
        version = probe.packages.get(package)
        if version is None:
            fix = f"{probe.python_path} -m pip install {package}, or set `python` in the cluster file"
            checks.append(Check(node.name, package, FAIL, "not installed", fix))
        else:
            checks.append(Check(node.name, package, OK, version))
    return checks


def _check_gpus(plan: LaunchPlan, node: NodePlan, probe: ProbeReply) -> list[Check]:
    if plan.device == "cpu":
        return [Check(node.name, "cpu", OK, f"{probe.cpu_count} cores for {node.slots} process(es)")]
    if len(probe.gpus) < node.slots:
        found = probe.gpu_error or f"{len(probe.gpus)} GPUs for {node.slots} slots"
        fix = "lower the node's slots in the cluster file, or repair the missing GPU (nvidia-smi, dmesg)"
        return [Check(node.name, "gpu", FAIL, found, fix)]
    busy = [gpu for gpu in probe.gpus[: node.slots] if gpu.memory_used > MAX_GPU_MEMORY_USED]
    if busy:
        found = ", ".join(f"GPU {gpu.index}: {_gib(gpu.memory_used)} in use" for gpu in busy)
        return [Check(node.name, "gpu", FAIL, found, "end the other process (nvidia-smi shows it) or wait for it")]
    return [Check(node.name, "gpu", OK, _describe_gpus(probe.gpus))]


def _describe_gpus(gpus: list[Gpu]) -> str:
    names = sorted({gpu.name for gpu in gpus})
    return f"{len(gpus)} x {', '.join(names)}, {_gib(min(gpu.memory_total for gpu in gpus))}"


def _check_lease(plan: LaunchPlan, node: NodePlan, probe: ProbeReply) -> Check:
    holder = probe.holder
    if holder is None:
        return Check(node.name, "lease", OK, "free")
    if (holder.owner.dag_id, holder.owner.run_id) == (plan.dag_id, plan.run_id):
        return Check(node.name, "lease", OK, "held by this run")
    found = f"held by {holder.owner.dag_id or 'job'} {holder.owner.run_id or holder.job_id} at {holder.owner.origin}"
    return Check(node.name, "lease", FAIL, found, "wait for that run, or end it")


def _check_clock(node: NodePlan, skew_s: float) -> Check:
    if abs(skew_s) > MAX_CLOCK_SKEW_S:
        fix = "synchronise the clock (chrony, systemd-timesyncd)"
        return Check(node.name, "clock", WARN, f"{skew_s:+.1f} s off", fix)
    return Check(node.name, "clock", OK, f"{skew_s:+.2f} s")


def _check_equal(plan: LaunchPlan, facts: Mapping[str, NodeFacts]) -> list[Check]:
    """One line for each thing that differs between nodes: ranks of different versions fail late, if at all."""
    values: dict[str, dict[str, str]] = {"python": {name: fact.probe.python_version for name, fact in facts.items()}}
    for package in required_packages(plan):
        values[package] = {name: fact.probe.packages.get(package) or "" for name, fact in facts.items()}
    checks = []
    for what, by_node in values.items():
        versions = {version for version in by_node.values() if version}
        if len(versions) > 1:
            found = ", ".join(f"{name} {version}" for name, version in by_node.items() if version)
            checks.append(Check("all", what, FAIL, f"differs: {found}", "install the same version on every node"))
    return checks


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
