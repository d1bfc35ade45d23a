"""Is every node fit to train? One look at all nodes at once: what the ``preflight`` task and the command line share."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    from swift_provider.exceptions import TrainingError
    from swift_provider.hooks.group import NodeGroup


REACH_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Preflight:
    """What was found: every check, what each node answered, and why the others did not answer."""

    checks: list[Check]
    facts: dict[str, NodeFacts]
    errors: dict[str, TrainingError]

    @property
    def faults(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.level == FAIL]

    @property
    def warnings(self) -> list[str]:
        """What works and is seldom meant, one line each."""
        return [f"{check.node}: {check.name}: {check.found}" for check in self.checks if check.level == WARN]

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """The table: level, node, check, what was found, what to do; failed lines first."""
        order = {FAIL: 0, WARN: 1}
        ordered = sorted(self.checks, key=lambda check: order.get(check.level, 2))
        return [(check.level, check.node, check.name, check.found, check.fix) for check in ordered]

    def failure(self) -> type[TrainingError]:
        """The class to fail with: one of its own for what passes by itself, so that it is tried again for longer."""
        from swift_provider.exceptions import NodeBusy, PreflightFailed

        names = {check.name for check in self.faults}
        if LEASE in names and names <= {LEASE, RENDEZVOUS}:  # whoever trains there has the port too
            return NodeBusy
        kinds = {type(error) for error in self.errors.values()}
        if names == {SSH} and len(kinds) == 1:
            return kinds.pop()
        return PreflightFailed


#: Columns of :meth:`Preflight.rows`.
COLUMNS = ("", "node", "check", "found", "fix")


def look_at_nodes(plan: LaunchPlan, new_group: Callable[[], NodeGroup], origin: str) -> Preflight:
    """Probes all nodes of ``plan``; what one of them lacks hides nothing of the others.

    Args:
        plan: of the run.
        new_group: makes the group of the plan's nodes.
        origin: what this Airflow is called in leases.
    """
    return asyncio.run(_look(plan, new_group(), origin))


async def _look(plan: LaunchPlan, group: NodeGroup, origin: str) -> Preflight:
    async with group:
        facts, errors = await gather_facts(plan, group, origin)
        checks = check_nodes(plan, facts, {name: str(error) for name, error in errors.items()}, origin)
        checks += await _check_other_versions(plan, group, facts)
    return Preflight(checks, facts, errors)


async def _check_other_versions(plan: LaunchPlan, group: NodeGroup, facts: Mapping[str, NodeFacts]) -> list[Check]:
    """The plan's arguments against nodes whose ms-swift is not the version that the plan was checked against."""
    versions = {name: fact.probe.packages.get("ms-swift") for name, fact in facts.items()}
    others = [name for name, version in versions.items() if version not in (None, PINNED_VERSION)]
    checks = []
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


async def gather_facts(
    plan: LaunchPlan, group: NodeGroup, origin: str
) -> tuple[dict[str, NodeFacts], dict[str, TrainingError]]:
    """What each node answers, over an open ``group``; and the errors of those that do not."""
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
        held_by_us = _held_by_this_run(plan, probes[plan.nodes[0].name], origin)
        reach = {} if held_by_us else await _check_rendezvous(plan, group, list(probes))
    facts = {
        name: NodeFacts(probe, probe.clock - middle, reach.get(name), group.sessions[name].endpoint.verifies_host_key)
        for name, probe in probes.items()
    }
    return facts, errors


def _held_by_this_run(plan: LaunchPlan, probe: ProbeReply, origin: str) -> bool:
    """A cleared preflight may find its own training running: then the port is taken, and rightly."""
    owner = probe.holder.owner if probe.holder else None
    return owner is not None and (owner.dag_id, owner.run_id, owner.origin) == (plan.dag_id, plan.run_id, origin)


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
