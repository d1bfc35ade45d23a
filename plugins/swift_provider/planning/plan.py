"""The launch plan: a value that says what will run on which node, before anything runs.

It is what the ``plan`` task returns, what a dry run shows, and what every later task works from.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import Field

from swift_provider.config.checkpoints import CheckpointPolicy
from swift_provider.config.docker import Docker
from swift_provider.config.export import ExportSection
from swift_provider.config.values import StrictModel


class MemoryEstimate(StrictModel):
    """Bytes that the training needs on its fullest GPU, at least.

    ``other`` is what is neither of the four: the CUDA context, communication buffers, gathered weights.
    ``alternatives`` says what the total would be with another choice, by its description.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    other: int
    alternatives: dict[str, int] = Field(default_factory=dict)

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.other

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "activations", "other")
        parts = ", ".join(f"{name} {gib(getattr(self, name))}" for name in names)
        return f"about {gib(self.total)} per GPU: {parts}"


def gib(size: int) -> str:
    """A size for people."""
    return f"{size / 2**30:.1f} GiB"


class NodePlan(StrictModel):
    """One node's part. ``rank`` is the node rank; ``slots`` the number of processes there.

    ``gpus`` are the GPU indexes that the job leases; ``None`` leases the whole node.
    """

    name: str
    ssh_conn_id: str
    address: str
    rank: int
    slots: int
    workdir: str
    output_dir: str
    gpus: list[int] | None = None


class LaunchPlan(StrictModel):
    """Everything that is decided before a node is touched. Sizes of batches are in samples, times in seconds."""

    dag_id: str
    run_id: str
    run_key: str
    recipe: str
    recipe_hash: str
    cluster: str
    command: str
    device: str
    python: str
    activate: list[str] = Field(default_factory=list)
    docker: Docker | None = None
    nodes: list[NodePlan]
    master_port: int
    shared: bool
    engine: str
    world_size: int
    data_parallel: int
    micro_batch: int
    accumulation: int
    global_batch: int
    args: dict[str, Any]
    env: dict[str, str]
    files: dict[str, str] = Field(default_factory=dict, description="name → text, written into each job's folder")
    inputs: list[str] = Field(default_factory=list, description="paths and oss:// locations that stage puts in place")
    hub_ids: list[str] = Field(default_factory=list, description="models and datasets that ms-swift itself fetches")
    min_free_bytes: int = 0
    checkpoints: CheckpointPolicy
    export: ExportSection | None = None
    max_runtime: float | None = None
    grace: float = 30.0
    dry_run: bool = False
    prune_dry_run: bool = False
    warnings: list[str] = Field(default_factory=list, description="what works and is seldom meant")
    memory: MemoryEstimate | None = Field(default=None, description="of one GPU, where the model's config is at hand")

    @property
    def program(self) -> tuple[str, str]:
        """ms-swift's program and method: ``("megatron", "sft")`` for ``megatron sft``, ``("swift", "sft")`` else."""
        first, _, rest = self.command.partition(" ")
        return (first, rest) if rest else ("swift", first)

    @property
    def master_address(self) -> str:
        """Where the ranks meet: the first node's address."""
        return self.nodes[0].address

    @property
    def agent_python(self) -> str:
        """The interpreter that the agent runs with on each node."""
        return self.docker.agent_python if self.docker else self.python

    @property
    def backup_prefix(self) -> str | None:
        """``oss://bucket/prefix/<dag>/<run>`` of this run's checkpoints, or ``None`` without a backup."""
        from swift_provider.planning.names import safe_name

        if self.checkpoints.backup is None:
            return None
        return f"{self.checkpoints.backup}/{safe_name(self.dag_id)}/{safe_name(self.run_id)}"

    def for_run(self, dag_id: str, run_id: str) -> LaunchPlan:
        """The same nodes with the output folders of another run, to look at what it left there."""
        from swift_provider.planning.names import run_key

        key = run_key(dag_id, run_id)
        nodes = [
            node.model_copy(
                update={"output_dir": f"{node.output_dir.removesuffix(f'{self.run_key}/output')}{key}/output"}
            )
            for node in self.nodes
        ]
        return self.model_copy(update={"dag_id": dag_id, "run_id": run_id, "run_key": key, "nodes": nodes})

    def digest(self) -> str:
        """A hash of the whole plan: equal digest = the same training on the same nodes. 16 hexadecimal digits."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """The plan as a person reads it in the task's log."""
        lines = [
            f"recipe {self.recipe} ({self.recipe_hash}) on cluster {self.cluster}: "
            f"{' '.join(self.program)}, {self.engine}, {self.device}",
            f"world size {self.world_size} = " + " + ".join(f"{node.name}:{node.slots}" for node in self.nodes),
            f"global batch {self.global_batch} = micro batch {self.micro_batch} x accumulation {self.accumulation}"
            + (f" x world size {self.world_size}" if self.data_parallel == self.world_size else "")
            + (f" x data parallel {self.data_parallel}" if self.data_parallel != self.world_size else ""),
            f"rendezvous {self.master_address}:{self.master_port}",
            f"output {self.nodes[0].output_dir}" + (" (shared)" if self.shared else " (on each node)"),
            f"backup {self.backup_prefix or 'none'}; keep last {self.checkpoints.keep_last}"
            + (f", best {self.checkpoints.keep_best.metric}" if self.checkpoints.keep_best else ""),
        ]
        lines += [f"export {self.export.checkpoint} checkpoint: {self.export.args}"] if self.export else []
        lines += [f"memory {self.memory}"] if self.memory else []
        lines += [f"warning: {text}" for text in self.warnings]
        gpus = [f"{node.name}: GPUs {', '.join(map(str, node.gpus))}" for node in self.nodes if node.gpus is not None]
        lines += gpus + [f"activate {' '.join(self.activate)}"] * bool(self.activate)
        lines += [f"container {self.docker.image}"] if self.docker else []
        lines += [f"stage {source}" for source in self.inputs]
        lines += [f"from the hub, by ms-swift: {name}" for name in self.hub_ids]
        lines += ["arguments:"] + [f"  {name}: {value}" for name, value in sorted(self.args.items())]
        return "\n".join(lines)
