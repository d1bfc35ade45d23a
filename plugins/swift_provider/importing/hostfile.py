"""Turns a DeepSpeed hostfile into a cluster file."""

from __future__ import annotations

from typing import Any

import yaml

from swift_provider.config.hostfile import parse_hostfile


def import_hostfile(text: str, *, name: str, python: str, ssh_conn_id: str = "{host}") -> tuple[str, list[str]]:
    """The cluster file, and what is to be said of it.

    Raises:
        ValueError: the hostfile has bad lines, or ``ssh_conn_id`` is no template.
    """
    hosts = parse_hostfile(text)
    nodes: list[dict[str, Any]] = [
        {"name": host.name, "ssh_conn_id": host.fill(ssh_conn_id), "address": host.host, "slots": host.slots}
        for host in hosts
    ]
    lines = [f"name: {name}", "nodes:"]
    for node in nodes:
        flow = yaml.safe_dump(node, default_flow_style=True, sort_keys=False, width=1000).strip()
        lines.append(f"  - {flow}")
    lines += [f"python: {python}", ""]
    notes = [
        f"{host.text}: user and port belong into the Airflow connection {node['ssh_conn_id']}"
        for host, node in zip(hosts, nodes, strict=True)
        if host.user or host.port
    ]
    return "\n".join(lines), notes
