"""The plan of a run's export: one job on one node, made from the plan of the training. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from swift_provider.config.errors import Fault
from swift_provider.config.recipe import Recipe
from swift_provider.planning.arguments import check_arguments
from swift_provider.planning.catalogue import arguments_of
from swift_provider.planning.engines.setting import truth
from swift_provider.planning.plan import LaunchPlan, NodePlan

COMMAND = "export"
#: What the training was told of its model, and an export must hear as well.
_OF_THE_MODEL = ("model_type", "template", "torch_dtype", "attn_impl", "use_hf", "external_plugins", "model_revision")
#: What ``swift export`` reads of a full or of an adapter's checkpoint.
_WEIGHTS = ("adapter_", "model", "config.json", "pytorch_model")


class Checkpoint(Protocol):
    """What this module needs to know of a checkpoint; see ``operators.checkpoints.RunCheckpoint``."""

    @property
    def name(self) -> str:
        """Its folder's name."""

    @property
    def step(self) -> int:
        """Of the training."""

    @property
    def whole(self) -> bool:
        """Nothing is missing."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """As the trainer recorded them."""

    @property
    def holders(self) -> Mapping[str, list[str]]:
        """For each file the nodes that have it."""


def check_export(recipe: Recipe, args: Mapping[str, Any], shown: str) -> list[Fault]:
    """Why ``recipe`` cannot be exported as it asks; ``args`` are those of the training, run parameters included."""
    section = recipe.export
    if section is None:
        return []
    faults = [
        Fault(shown, f"export.args.{name}", problem)
        for name, problem in check_arguments(COMMAND, section.args, arguments_of(COMMAND)).items()
    ]
    if recipe.swift.command.startswith("megatron"):
        problem = f"{recipe.swift.command} writes Megatron's own checkpoints, which `swift export` does not take"
        faults.append(Fault(shown, "export", f"{problem}; leave it out"))
    full = str(args.get("tuner_type", "lora")) == "full"
    if truth(section.args.get("merge_lora")) and full:
        problem = "tuner_type full trains the whole model: there is no adapter to merge; leave it out"
        faults.append(Fault(shown, "export.args.merge_lora", f"{problem} (got {section.args['merge_lora']})"))
    if section.checkpoint == "best" and recipe.checkpoints.keep_best is None:
        problem = "best needs checkpoints.keep_best, which says by which metric (got best)"
        faults.append(Fault(shown, "export.checkpoint", problem))
    return faults


def choose_checkpoint(plan: LaunchPlan, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The checkpoint that the recipe means: the newest whole one, or among those with the metric the best."""
    whole = [checkpoint for checkpoint in checkpoints if checkpoint.whole]
    best = plan.checkpoints.keep_best
    if plan.export is not None and plan.export.checkpoint == "best" and best is not None:
        sign = 1 if best.mode == "max" else -1
        scored = [checkpoint for checkpoint in whole if best.metric in checkpoint.metrics]
        return max(scored, key=lambda item: (sign * item.metrics[best.metric], item.step), default=None)
    return max(whole, key=lambda item: item.step, default=None)


def node_with(plan: LaunchPlan, checkpoint: Checkpoint) -> NodePlan | None:
    """The first node that holds all weights of ``checkpoint``; ``None`` where each holds only a part."""
    wanted = [path for path in checkpoint.holders if path.rpartition("/")[2].startswith(_WEIGHTS)]
    return next(
        (node for node in plan.nodes if all(node.name in checkpoint.holders[path] for path in wanted)),
        None,
    )


def export_dir(plan: LaunchPlan) -> str:
    """The folder of a run's exports, beside that of its checkpoints; each is named like its checkpoint."""
    return plan.nodes[0].output_dir.rpartition("/")[0] + "/export"


def export_plan(plan: LaunchPlan, node: NodePlan, checkpoint: str, adapter: bool) -> LaunchPlan:
    """A gang of one node with one process.

    Args:
        plan: of the training; has an ``export``.
        node: one of its nodes, that holds the weights.
        checkpoint: the folder's name.
        adapter: whether it is an adapter of the model, and not a model.
    """
    section = plan.export
    if section is None:
        raise ValueError(f"recipe {plan.recipe} has no export")
    source = f"{node.output_dir}/{checkpoint}"
    known = arguments_of(COMMAND)
    args = {name: plan.args[name] for name in _OF_THE_MODEL if name in plan.args and name in known}
    plugins = args.get("external_plugins")
    if isinstance(plugins, list):  # those of the job's folder make process groups, and here is one process
        args["external_plugins"] = [path for path in plugins if not str(path).startswith("{job_dir}/")]
    args |= {"model": plan.args["model"], "adapters": [source]} if adapter else {"model": source}
    args = {name: value for name, value in {**args, **section.args}.items() if value not in (None, [])}
    folder = node.output_dir.rpartition("/")[0] + f"/export/{checkpoint}"
    return plan.model_copy(
        update={
            "command": COMMAND,
            "nodes": [node.model_copy(update={"rank": 0, "slots": 1, "output_dir": folder})],
            "world_size": 1,
            "data_parallel": 1,
            "args": args,
            "files": {},
        }
    )
