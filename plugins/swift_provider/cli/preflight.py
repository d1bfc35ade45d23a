"""The command that reaches the nodes. Imported only when it is called: it needs Airflow."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from swift_provider.cli.files import plan_of
from swift_provider.cli.output import print_table
from swift_provider.config import Cluster, ConfigError, Fault, Recipe
from swift_provider.hooks.outside import ConnectionMissing, connections_of, group_over
from swift_provider.planning.checks import FAIL, WARN
from swift_provider.preflight import COLUMNS, Preflight, look_at_nodes
from swift_provider.settings import origin

_STYLES = {FAIL: "bold red", WARN: "yellow"}


def run_preflight(recipe: Recipe, cluster: Cluster, params: dict[str, Any], config_dir: Path) -> Preflight:
    """What the ``preflight`` task of a run would find.

    Raises:
        ConfigError: the plan is wrong, or a node can be reached by nothing.
    """
    # What Airflow, alembic and the SSH client tell while they are at work is not the answer.
    logging.getLogger().setLevel(logging.ERROR)
    try:
        connections = connections_of(cluster)
        hosts = {conn_id: connection.host or "" for conn_id, connection in connections.items()}
        plan = plan_of(recipe, cluster, params, config_dir, hosts)
        return look_at_nodes(plan, lambda: group_over(plan, connections), origin())
    except (ConnectionMissing, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError([Fault("connections", "", line) for line in str(error).splitlines()]) from None


def show(found: Preflight) -> None:
    """The table on stdout, as in the task's log; coloured on a terminal."""
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for level, *rest in found.rows():
        table.add_row(Text(level, style=_STYLES.get(level, "green")), *(Text(text) for text in rest))
    print_table(table)
