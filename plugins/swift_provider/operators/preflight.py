"""``preflight``: is every node fit to train? One table with all faults of all nodes."""

from __future__ import annotations

from typing import Any

from airflow.sdk import Context

from swift_provider.hooks.nodes import NodesHook
from swift_provider.operators.base import PlanConsumer, render_table
from swift_provider.preflight import COLUMNS, look_at_nodes
from swift_provider.settings import origin


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
        found = look_at_nodes(plan, NodesHook.for_plan(plan).group, origin())
        table = render_table(COLUMNS, found.rows())
        if found.faults:
            raise found.failure()(f"{len(found.faults)} faults on the nodes\n{table}")
        self.log.info("preflight\n%s", table)
        return {
            "packages": {name: fact.probe.packages for name, fact in found.facts.items()},
            "warnings": found.warnings,
        }
