"""The cluster: the nodes that a run may use, with their shared settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from swift_provider.config.docker import Docker
from swift_provider.config.hostfile import parse_hostfile
from swift_provider.config.network import Network
from swift_provider.config.values import AbsolutePath, Name, StrictModel


class Node(StrictModel):
    """One host. ``slots`` is its number of GPUs, or of processes on a CPU cluster."""

    name: Name
    ssh_conn_id: str = Field(min_length=1, description="Airflow connection of type ssh")
    address: str | None = Field(
        default=None,
        min_length=1,
        description="address that the other nodes reach it by; default: the connection's host",
    )
    slots: int = Field(default=8, ge=1, le=64)
    gpus: list[int] | None = Field(
        default=None, min_length=1, description="lease these GPUs only, so that other clusters may use the rest"
    )
    workdir: AbsolutePath | None = Field(default=None, description="overrides the cluster's workdir")
    labels: list[Name] = Field(default_factory=list, description="words that the run parameter nodes may use, too")
    spare: bool = Field(default=False, description="trains only when it is named, or in place of an excluded node")

    @model_validator(mode="after")
    def _one_gpu_a_slot(self) -> Self:
        if self.gpus is not None:
            if len(set(self.gpus)) != len(self.gpus) or min(self.gpus) < 0:
                raise ValueError(f"gpus of {self.name}: give each index once, from 0 on")
            if len(self.gpus) != self.slots:
                raise ValueError(
                    f"gpus of {self.name}: {len(self.gpus)} indexes for {self.slots} slots; make them equal"
                )
        return self


class Cluster(StrictModel):
    """One cluster file."""

    name: Name
    description: str = ""
    hostfile: str | None = Field(
        default=None, min_length=1, description="nodes in DeepSpeed's hostfile format: a path, or the lines themselves"
    )
    ssh_conn_id: str | None = Field(
        default=None, min_length=1, description="connection of nodes that name none; {host} stands for the host"
    )
    nodes: list[Node] = Field(default_factory=list)
    device: Literal["gpu", "cpu"] = "gpu"
    python: AbsolutePath = Field(description="interpreter of the training environment, the same path on each node")
    workdir: AbsolutePath = Field(
        default="/var/lib/swift-trainer", description="folder for jobs and caches on each node"
    )
    shared_dir: AbsolutePath | None = Field(
        default=None, description="folder on a disk that all nodes share; checkpoints go there when it is set"
    )
    master_port: int = Field(default=29500, ge=1024, le=65535)
    env: dict[str, str] = Field(default_factory=dict, description="environment variables of every rank on this cluster")
    network: Network | None = Field(default=None, description="ethernet, roce or infiniband, with details")
    activate: list[str] = Field(
        default_factory=list, description="script that is sourced before the training, with its arguments"
    )
    docker: Docker | None = Field(default=None, description="run the training in a container")
    pool: str | None = Field(default=None, description="Airflow pool that the training occupies while it runs")
    min_free_gib: float = Field(default=20.0, ge=0, description="free disk space that a node must have, in GiB")
    price_per_hour: float | None = Field(default=None, ge=0, description="of one node, all its GPUs together")
    currency: str = Field(default="CNY", pattern="^[A-Z]{3}$", description="of price_per_hour, three letters")

    @field_validator("hostfile")
    @classmethod
    def _read_hostfile(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        text = value if "slots=" in value or "\n" in value else _read(value, info)
        parse_hostfile(text)
        return text

    @field_validator("nodes", mode="before")
    @classmethod
    def _complete_nodes(cls, nodes: Any, info: ValidationInfo) -> Any:
        text, template = info.data.get("hostfile"), info.data.get("ssh_conn_id")
        if not isinstance(nodes, list) or not all(isinstance(node, (dict, Node)) for node in nodes):
            return nodes
        if text is not None:
            nodes = _nodes_of_hostfile(text, template or "{host}", nodes)
        elif template is not None:
            nodes = [_with_connection(node, template) for node in nodes]
        return nodes

    @field_validator("activate", mode="before")
    @classmethod
    def _one_script(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("activate")
    @classmethod
    def _absolute_script(cls, value: list[str]) -> list[str]:
        if value and not value[0].startswith("/"):
            raise ValueError("is not an absolute path; write it from / on")
        return value

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for attribute in ("name", "ssh_conn_id"):
            values = [getattr(node, attribute) for node in self.nodes]
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise ValueError(f"nodes: {attribute} {', '.join(twice)} is there twice; a host may train once only")
        return self

    @model_validator(mode="after")
    def _some_train(self) -> Self:
        if not self.nodes:
            raise ValueError("nodes: is missing; add it, or a hostfile")
        names = {node.name for node in self.nodes}
        both = sorted({label for node in self.nodes for label in node.labels if label in names})
        if both:
            raise ValueError(f"nodes: {', '.join(both)} is the name of a node and a label; choose another label")
        if all(node.spare for node in self.nodes):
            raise ValueError("nodes: all are spare; leave spare out of those that train")
        return self

    @property
    def agent_python(self) -> str:
        """The interpreter that the agent runs with on each node."""
        return self.docker.agent_python if self.docker else self.python

    def workdir_of(self, node: Node) -> str:
        """The folder that the agent uses on ``node``."""
        return node.workdir or self.workdir


def _read(value: str, info: ValidationInfo) -> str:
    folder = (info.context or {}).get("folder") or "."
    path = Path(folder) / value
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise ValueError(f"cannot read {path}: {reason}; write the path of a hostfile, or its lines") from None


def _nodes_of_hostfile(text: str, template: str, more: list[Any]) -> list[Any]:
    """The hostfile's nodes; ``more`` has further keys for some of them, by name."""
    hosts = parse_hostfile(text)
    extra = {node.get("name"): node for node in more if isinstance(node, dict)}
    unknown = sorted(str(name) for name in extra if name not in {host.name for host in hosts})
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: not in the hostfile; add it there, or leave it out here")
    return [
        {
            "name": host.name,
            "ssh_conn_id": host.fill(template),
            "address": host.host,
            "slots": host.slots,
            **extra.get(host.name, {}),
        }
        for host in hosts
    ]


def _with_connection(node: Any, template: str) -> Any:
    if not isinstance(node, dict) or "ssh_conn_id" in node or not isinstance(node.get("name"), str):
        return node
    return {"ssh_conn_id": template.replace("{host}", node["name"]).replace("{name}", node["name"]), **node}
