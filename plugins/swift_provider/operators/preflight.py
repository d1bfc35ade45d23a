"""``preflight``: is every node fit to train? One table with all faults of all nodes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context

from swift_provider.exceptions import NodeBusy, PreflightFailed, TrainingError
from swift_provider.hooks.nodes import NodesHook
from swift_provider.operators.base import PlanConsumer, render_table
from swift_provider.planning.arguments import check_arguments
from swift_provider.planning.catalogue import PINNED_VERSION
from swift_provider.planning.checks import (
    FAIL,
    LEASE,
    RENDEZVOUS,
    SSH,
    WARN,
    Check,
    NodeFacts,
    check_nodes,
    required_packages,
)
from swift_provider.planning.plan import LaunchPlan
from swift_provider.settings import origin
from trainer.protocol import (
    ArgumentsReply,
    ArgumentsRequest,
    ListenReply,
    ListenRequest,
    ProbeReply,
    ProbeRequest,
    ReachReply,
    ReachRequest,
)

if TYPE_CHECKING:
    from swift_provider.hooks.group import NodeGroup


REACH_TIMEOUT_S = 15.0


class PreflightOperator(PlanConsumer):
    """Probes all nodes at once and returns what it found; fails with a table of every fault and its fix.

    Args:
        plan: see :class:`~swift_provider.operators.base.PlanConsumer`.
    """

    def execute(self, context: Context) -> dict[str, Any]:
        """See the class.

        Raises:
            PreflightFailed: at least one check failed; of the subclass that tells what kind when all are of one.
        """
        plan = self.launch_plan
        group = NodesHook.for_plan(plan).group()
        facts, errors = asyncio.run(_gather_facts(plan, group))
        checks = check_nodes(plan, facts, {name: str(error) for name, error in errors.items()}, origin())
        checks += asyncio.run(_check_other_versions(plan, NodesHook.for_plan(plan).group(), facts))
        failed = [check for check in checks if check.level == FAIL]
        if failed:
            raise _failure(failed, errors)(f"{len(failed)} faults on the nodes\n{render(checks)}")
        self.log.info("preflight\n%s", render(checks))
        return {
            "packages": {name: fact.probe.packages for name, fact in facts.items()},
            "warnings": [f"{check.node}: {check.name}: {check.found}" for check in checks if check.level == WARN],
        }


async def _check_other_versions(plan: LaunchPlan, group: NodeGroup, facts: Mapping[str, NodeFacts]) -> list[Check]:
    """The plan's arguments against nodes whose ms-swift is not the version that the plan was checked against."""
    versions = {name: fact.probe.packages.get("ms-swift") for name, fact in facts.items()}
    others = [name for name, version in versions.items() if version not in (None, PINNED_VERSION)]
    checks = []
    async with group:
        requests = {name: ArgumentsRequest(command=plan.command) for name in others}
        replies, errors = await group.call_each("arguments", requests, ArgumentsReply)
    for name in others:
        reply = replies.get(name)
        if reply is None or reply.error:
            found = str(errors[name]) if reply is None else str(reply.error)
            fix = f"install ms-swift {PINNED_VERSION}, which this provider knows"
            checks.append(Check(name, "arguments", WARN, found, fix))
            continue
        for argument, problem in check_arguments(plan.command, plan.args, reply.arguments).items():
            found = f"{argument}: ms-swift {reply.version}: {problem}"
            fix = f"change the recipe, or install ms-swift {PINNED_VERSION} on the node"
            checks.append(Check(name, "arguments", FAIL, found, fix))
    return checks


def _failure(failed: list[Check], errors: Mapping[str, TrainingError]) -> type[TrainingError]:
    """A class of its own for what passes by itself, so that it is tried again for longer."""
    names = {check.name for check in failed}
    if LEASE in names and names <= {LEASE, RENDEZVOUS}:  # whoever trains there has the port too
        return NodeBusy
    kinds = {type(error) for error in errors.values()}
    if names == {SSH} and len(kinds) == 1:
        return kinds.pop()
    return PreflightFailed


async def _gather_facts(plan: LaunchPlan, group: NodeGroup) -> tuple[dict[str, NodeFacts], dict[str, TrainingError]]:
    async with group:
        # The first call logs in and ships the agent, so that the second measures the clock and not the handshake.
        requests = {
            node.name: ProbeRequest(
                workdir=node.workdir,
                packages=required_packages(plan),
                shared_dir=plan.nodes[0].output_dir.rsplit("/runs/", 1)[0] if plan.shared else None,
            )
            for node in plan.nodes
        }
        await group.call_each("probe", requests, ProbeReply)
        before = time.time()
        probes, errors = await group.call_each("probe", requests, ProbeReply)
        middle = (before + time.time()) / 2
        reach: dict[str, str | None] = {}
        if len(plan.nodes) > 1 and plan.nodes[0].name in probes:
            held_by_us = _held_by_this_run(plan, probes[plan.nodes[0].name])
            reach = {} if held_by_us else await _check_rendezvous(plan, group, list(probes))
    facts = {
        name: NodeFacts(probe, probe.clock - middle, reach.get(name), group.sessions[name].endpoint.verifies_host_key)
        for name, probe in probes.items()
    }
    return facts, errors


def _held_by_this_run(plan: LaunchPlan, probe: ProbeReply) -> bool:
    """A cleared preflight may find its own training running: then the port is taken, and rightly."""
    owner = probe.holder.owner if probe.holder else None
    return owner is not None and (owner.dag_id, owner.run_id, owner.origin) == (plan.dag_id, plan.run_id, origin())


async def _check_rendezvous(plan: LaunchPlan, group: NodeGroup, names: list[str]) -> dict[str, str | None]:
    """The first node listens on the master port; every node calls it by the address that the ranks will use."""
    master, nonce = plan.nodes[0].name, secrets.token_hex(16)
    listen = ListenRequest(port=plan.master_port, nonce=nonce, expect=len(names), timeout_s=REACH_TIMEOUT_S)
    reach = ReachRequest(
        host=plan.master_address, port=plan.master_port, nonce=nonce, timeout_s=REACH_TIMEOUT_S * 2 / 3
    )
    (heard, listen_errors), (replies, errors) = await asyncio.gather(
        group.call_each("listen", {master: listen}, ListenReply),
        group.call_each("reach", dict.fromkeys(names, reach), ReachReply),
    )
    result: dict[str, str | None] = {name: reply.error for name, reply in replies.items()}
    result |= {name: str(error) for name, error in errors.items()}
    listen_error = heard[master].error if master in heard else str(listen_errors[master])
    if listen_error:
        result[master] = listen_error
    return result


def render(checks: list[Check]) -> str:
    """The table as text, failed lines first."""
    order = {FAIL: 0, WARN: 1}
    ordered = sorted(checks, key=lambda check: order.get(check.level, 2))
    rows = [(check.level, check.node, check.name, check.found, check.fix) for check in ordered]
    return render_table(("", "node", "check", "found", "fix"), rows)
