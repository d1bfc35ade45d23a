"""What the operators share: they work from the launch plan that the ``plan`` task returned."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from airflow.sdk import BaseOperator

from swift_provider.planning.plan import LaunchPlan


class PlanConsumer(BaseOperator):
    """An operator whose work is described by a launch plan.

    Args:
        plan: what ``PlanOperator`` returned; usually ``plan_task.output`` or a template that renders to it.
    """

    template_fields: Sequence[str] = ("plan",)

    def __init__(self, *, plan: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan = plan

    @property
    def launch_plan(self) -> LaunchPlan:
        """The plan, once templates are rendered."""
        return LaunchPlan.model_validate(self.plan)


def render_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for the task log: aligned columns, no frame, wide enough for a fix on one line."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=200, color_system=None, markup=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
