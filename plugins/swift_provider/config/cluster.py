"""The cluster: the nodes that a run may use, with their shared settings."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

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
    nodes: list[Node] = Field(min_length=1)
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
    pool: str | None = Field(default=None, description="Airflow pool that the training occupies while it runs")
    min_free_gib: float = Field(default=20.0, ge=0, description="free disk space that a node must have, in GiB")

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for attribute in ("name", "ssh_conn_id"):
            values = [getattr(node, attribute) for node in self.nodes]
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise ValueError(f"nodes: {attribute} {', '.join(twice)} is there twice; a host may train once only")
        return self

    def workdir_of(self, node: Node) -> str:
        """The folder that the agent uses on ``node``."""
        return node.workdir or self.workdir
