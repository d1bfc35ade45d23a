"""Facts about nodes → what is wrong with them, each fault with its fix. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swift_provider.planning.engines import megatron
from swift_provider.planning.estimate import judge
from swift_provider.planning.plan import LaunchPlan, NodePlan
from trainer.protocol import Gpu, ProbeReply

#: OSS refuses requests that are 15 min off; log lines of nodes stop lining up long before.
MAX_CLOCK_SKEW_S = 5.0
#: A GPU that holds more than this before the start is in use by someone else (NVRx waits for 512 MB as well).
MAX_GPU_MEMORY_USED = 512 * 2**20
#: NCCL and data loaders share memory through /dev/shm; containers often have 64 MiB.
MIN_SHM_FREE = 2**30

OK, WARN, FAIL = "ok", "warn", "FAIL"
LEASE, SSH, RENDEZVOUS = "lease", "ssh", "rendezvous"


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
    host_key_verified: bool = True


def required_packages(plan: LaunchPlan) -> list[str]:
    """Distributions whose versions must be there and equal on all nodes; of a container's nothing can be seen."""
    if plan.docker:
        return ["oss2"] if plan.checkpoints.backup or any(item.startswith("oss://") for item in plan.inputs) else []
    names = ["torch", "ms-swift", "transformers", "oss2"]
    if plan.args.get("deepspeed"):
        names.append("deepspeed")
    if plan.engine == megatron.NAME:
        names += ["megatron-core", "mcore-bridge"]
    return names


def check_nodes(
    plan: LaunchPlan, facts: Mapping[str, NodeFacts], errors: Mapping[str, str], origin: str = ""
) -> list[Check]:
    """Every check of every node.

    Args:
        plan: of the run.
        facts: answers, by node name.
        errors: why the other nodes did not answer, by node name.
        origin: this Airflow's name in leases.
    """
    checks = []
    for node in plan.nodes:
        if node.name in errors:
            checks.append(Check(node.name, SSH, FAIL, "no answer", errors[node.name]))
            continue
        checks += _check_node(plan, node, facts[node.name], origin)
    return checks + _check_equal(plan, facts)


def _check_node(plan: LaunchPlan, node: NodePlan, facts: NodeFacts, origin: str) -> list[Check]:
    probe = facts.probe
    checks = [
        _check_host_key(node, facts),
        Check(node.name, "python", OK, f"{probe.python_version} {probe.python_path}"),
        *_check_folders(plan, node, probe),
        *_check_packages(plan, node, probe),
        *_check_gpus(plan, node, probe),
        *_check_leases(plan, node, probe, origin),
        _check_clock(node, facts.skew_s),
    ]
    if probe.shm_free is not None and plan.device == "gpu" and probe.shm_free < MIN_SHM_FREE:
        fix = "enlarge /dev/shm (docker: --shm-size 16g or --ipc host)"
        checks.append(Check(node.name, "shared memory", FAIL, f"{_gib(probe.shm_free)} free", fix))
    if len(plan.nodes) > 1:
        where = f"{plan.master_address}:{plan.master_port}"
        if facts.reach_error:
            fix = "free the port or open it between the nodes (firewall, security group), or set master_port / address"
            checks.append(Check(node.name, RENDEZVOUS, FAIL, f"{where}: {facts.reach_error}", fix))
        else:
            checks.append(Check(node.name, RENDEZVOUS, OK, where))
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
    checks.append(_check_disk(plan, node, "disk", probe.disk_free))
    if plan.shared:
        checks.append(_check_disk(plan, node, "shared disk", probe.shared_disk_free))
    return checks


def _check_disk(plan: LaunchPlan, node: NodePlan, name: str, free: int | None) -> Check:
    if free is None:
        return Check(node.name, name, WARN, "free space not known")
    if free >= plan.min_free_bytes:
        return Check(node.name, name, OK, f"{_gib(free)} free")
    fix = f"free space up to {_gib(plan.min_free_bytes)} (min_free_gib in the cluster file)"
    return Check(node.name, name, FAIL, f"{_gib(free)} free", fix)


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
    wanted = node.gpus if node.gpus is not None else list(range(node.slots))
    gpus = [gpu for gpu in probe.gpus if gpu.index in wanted]
    if len(gpus) < len(wanted):
        found = probe.gpu_error or f"{len(probe.gpus)} GPUs, wanted {', '.join(map(str, wanted))}"
        fix = "correct slots or gpus in the cluster file, or repair the missing GPU (nvidia-smi, dmesg)"
        return [Check(node.name, "gpu", FAIL, found, fix)]
    busy = [gpu for gpu in gpus if gpu.memory_used > MAX_GPU_MEMORY_USED]
    if busy and not any(_overlap(holder.gpus, node.gpus) for holder in probe.holders):
        found = ", ".join(f"GPU {gpu.index}: {_gib(gpu.memory_used)} in use" for gpu in busy)
        return [Check(node.name, "gpu", FAIL, found, "end the other process (nvidia-smi shows it) or wait for it")]
    return [Check(node.name, "gpu", OK, _describe_gpus(gpus)), *_check_memory(plan, node, gpus)]


def _check_memory(plan: LaunchPlan, node: NodePlan, gpus: list[Gpu]) -> list[Check]:
    if plan.memory is None or not gpus:
        return []
    verdict = judge(plan.memory, min(gpu.memory_total for gpu in gpus))
    return [Check(node.name, "gpu memory", OK if verdict.fits else WARN, verdict.text, verdict.advice)]


def _describe_gpus(gpus: list[Gpu]) -> str:
    names = sorted({gpu.name for gpu in gpus})
    return f"{len(gpus)} x {', '.join(names)}, {_gib(min(gpu.memory_total for gpu in gpus))}"


def _check_host_key(node: NodePlan, facts: NodeFacts) -> Check:
    if facts.host_key_verified:
        return Check(node.name, SSH, OK, f"{facts.probe.hostname}, host key verified")
    fix = "remove no_host_key_check from the connection's Extra and add host_key"
    return Check(node.name, SSH, WARN, f"{facts.probe.hostname}, host key NOT verified", fix)


def _check_leases(plan: LaunchPlan, node: NodePlan, probe: ProbeReply, origin: str) -> list[Check]:
    ours = (plan.dag_id, plan.run_id, origin)
    in_the_way = [holder for holder in probe.holders if _overlap(holder.gpus, node.gpus)]
    if not in_the_way:
        return [Check(node.name, LEASE, OK, "free")]
    checks = []
    for holder in in_the_way:
        owner = holder.owner
        if (owner.dag_id, owner.run_id, owner.origin) == ours:
            checks.append(Check(node.name, LEASE, OK, "held by this run"))
        else:
            found = f"held by {owner.dag_id or 'job'} {owner.run_id or holder.job_id} at {owner.origin}"
            checks.append(Check(node.name, LEASE, FAIL, found, "wait for that run, or end it"))
    return checks


def _overlap(one: list[int] | None, other: list[int] | None) -> bool:
    """Two leases exclude each other; ``None`` is the whole node."""
    return one is None or other is None or bool(set(one) & set(other))


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
