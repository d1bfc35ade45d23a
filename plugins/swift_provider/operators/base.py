"""What the operators share: they work from the launch plan that the ``plan`` task returned."""

from __future__ import annotations

from collections.abc import Sequence
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
