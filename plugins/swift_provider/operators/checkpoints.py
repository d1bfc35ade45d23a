"""The checkpoints of a run as all its nodes together hold them, judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_provider.planning.plan import LaunchPlan
from trainer.checkpoints import Judgement, Union, judge, merge
from trainer.protocol import CheckpointsReply, CheckpointsRequest, Verdict

if TYPE_CHECKING:
    from swift_provider.hooks.group import NodeGroup


@dataclass(frozen=True)
class RunCheckpoint:
    """One checkpoint. ``holders`` says for each file which nodes have it; sizes are in bytes.

    ``texts`` holds the content of the small files that were read for the judgement, ``modified`` when the newest file
    was written (seconds since the epoch, by the node's clock).
    """

    name: str
    step: int
    judgement: Judgement
    sizes: dict[str, int]
    holders: dict[str, list[str]]
    texts: dict[str, str]
    modified: float = 0.0

    @property
    def whole(self) -> bool:
        """Nothing is missing; with or without optimizer state."""
        return self.judgement.verdict in (Verdict.COMPLETE, Verdict.WEIGHTS_ONLY)

    @property
    def metrics(self) -> dict[str, float]:
        """Those of this very step."""
        return self.judgement.metrics

    @property
    def size(self) -> int:
        """All files together, in bytes."""
        return sum(self.sizes.values())


async def gather_checkpoints(plan: LaunchPlan, group: NodeGroup) -> list[RunCheckpoint]:
    """Every checkpoint folder of the run, by step.

    Raises:
        TrainingError: a node did not answer; without its files nothing can be judged.
    """
    requests = {node.name: CheckpointsRequest(output_dir=node.output_dir) for node in plan.nodes}
    replies = await group.call_all("checkpoints", requests, CheckpointsReply)
    return [_judge(union) for union in merge({node: reply.checkpoints for node, reply in replies.items()})]


def _judge(union: Union) -> RunCheckpoint:
    judgement = judge(union.listing)
    return RunCheckpoint(
        name=union.name,
        step=judgement.step or 0,
        judgement=judgement,
        sizes={entry.path: entry.size for entry in union.listing.files},
        holders=union.holders,
        texts={entry.path: entry.text for entry in union.listing.files if entry.text is not None},
        modified=max((entry.mtime for entry in union.listing.files), default=0.0),
    )


def share_out(checkpoint: RunCheckpoint) -> dict[str, list[str]]:
    """Which node sends which files: each file once, the bytes as evenly as the holders allow.

    Returns:
        Paths, by node name.
    """
    loads: dict[str, int] = {}
    shares: dict[str, list[str]] = {}
    for path in sorted(checkpoint.holders, key=lambda path: (-checkpoint.sizes[path], path)):
        node = min(checkpoint.holders[path], key=lambda name: (loads.get(name, 0), name))
        loads[node] = loads.get(node, 0) + checkpoint.sizes[path]
        shares.setdefault(node, []).append(path)
    return shares
