"""The recipe: what to train, in ms-swift's own words, and what happens around it."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import Field, field_validator

from swift_provider.config.checkpoints import CheckpointPolicy
from swift_provider.config.export import ExportSection
from swift_provider.config.values import Name, Seconds, StrictModel

#: Arguments of ms-swift that the plan sets; in a recipe they would be ignored or do harm.
OWNED_ARGUMENTS = {
    "output_dir": "the output folder follows from the cluster's workdir or shared_dir and the run",
    "add_version": "it would hide the output folder behind a time stamp",
    "save_on_each_node": "it follows from whether the cluster has a shared_dir",
    "save_total_limit": "checkpoints.keep_last decides, so that nothing is deleted under an upload",
    "create_checkpoint_symlink": "it fails without an evaluation set; last-checkpoint is written anyway",
}
#: Environment variables that the plan sets for torchrun.
OWNED_ENVIRONMENT = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")


class SwiftSection(StrictModel):
    """What ``swift COMMAND file.yaml`` takes, word for word, so that it can be pasted in and taken out again.

    ``megatron sft`` is ``megatron sft file.yaml``: the other program of ms-swift.
    """

    command: Literal["sft", "pt", "rlhf", "megatron sft", "megatron pt", "megatron rlhf"] = "sft"
    args: dict[str, Any] = Field(description="ms-swift arguments without the leading dashes")
    env: dict[str, str] = Field(default_factory=dict, description="environment variables of every rank")

    @field_validator("args")
    @classmethod
    def _check_args(cls, args: dict[str, Any]) -> dict[str, Any]:
        problems = [f"{name}: leave it out, {why}" for name, why in OWNED_ARGUMENTS.items() if name in args]
        problems += [f"{name}: write it without dashes" for name in args if name.startswith("-")]
        if not args.get("model"):
            problems.append("model: is needed (a path, oss:// location or hub id)")
        if not (args.get("dataset") or args.get("cached_dataset")):
            problems.append("dataset: is needed (a path, oss:// location or hub id, or a list of them)")
        if problems:
            raise ValueError("; ".join(problems))
        return args

    @field_validator("env", mode="before")
    @classmethod
    def _text_values(cls, env: Any) -> Any:
        if isinstance(env, dict):
            return {key: str(value) if isinstance(value, (int, float)) else value for key, value in env.items()}
        return env

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        owned = [name for name in OWNED_ENVIRONMENT if name in env]
        if owned:
            raise ValueError(f"{', '.join(owned)}: leave out, they follow from the cluster")
        return env


class Recipe(StrictModel):
    """One recipe file."""

    name: Name
    description: str = ""
    swift: SwiftSection
    cluster: Name
    schedule: str | None = Field(default=None, description="cron expression of the nightly DAG")
    dag: bool | None = Field(
        default=None, description="whether the recipe has a DAG of its own; default: when it has a schedule"
    )
    overridable: list[str] = Field(
        default_factory=list, description="ms-swift arguments that become fields of the DAG's form"
    )
    checkpoints: CheckpointPolicy = Field(default_factory=CheckpointPolicy)
    export: ExportSection | None = Field(default=None, description="merge or quantize a checkpoint after the training")
    tuned_global_batch: int | None = Field(
        default=None, ge=1, description="global batch that the learning rate was tuned for; another one is remarked"
    )
    seconds_per_step: float | None = Field(
        default=None, gt=0, description="speed to forecast with, where no earlier run has measured one"
    )
    max_runtime: Seconds | None = Field(
        default=None, gt=0, description="seconds from the first start, over all retries"
    )
    grace: Seconds = Field(default=30.0, ge=0, description="seconds between TERM and KILL when a training is stopped")

    @field_validator("schedule")
    @classmethod
    def _check_schedule(cls, schedule: str | None) -> str | None:
        if schedule is not None and not schedule.startswith("@") and len(schedule.split()) != 5:
            raise ValueError('is not a cron expression of five fields such as "0 2 * * *"')
        return schedule

    @property
    def has_dag(self) -> bool:
        """Whether ``dags/swift_recipes.py`` makes a DAG of it."""
        return self.schedule is not None if self.dag is None else self.dag

    def digest(self) -> str:
        """A hash of everything in the recipe: equal digest = equal recipe. 16 hexadecimal digits."""
        content = self.model_dump(mode="json")
        later = ("export", "tuned_global_batch", "seconds_per_step")  # whose absence is as old as the hash
        content = {name: value for name, value in content.items() if name not in later or value is not None}
        text = json.dumps(content, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
