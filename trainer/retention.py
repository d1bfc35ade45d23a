"""Which checkpoints go and which stay: a pure decision over what is known of each, with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence, Set

from trainer.protocol import Verdict


@dataclass(frozen=True)
class Policy:
    """What the user wants kept.

    ``keep_last`` newest complete ones, at least one; the ``keep_best`` best by ``metric`` (0: none), where ``mode`` is
    ``min`` or ``max``. With ``backup`` nothing is deleted whose manifest has not been verified in the bucket.

    Raises:
        ValueError: a number is negative, ``mode`` is neither, or ``keep_best`` lacks its ``metric``.
    """

    keep_last: int = 2
    keep_best: int = 0
    metric: str = ""
    mode: str = "min"
    backup: bool = False

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.keep_best < 0:
            raise ValueError(f"keep_last must be >= 1 and keep_best >= 0, got {self.keep_last} and {self.keep_best}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode must be min or max, got {self.mode!r}")
        if self.keep_best and not self.metric:
            raise ValueError("keep_best needs a metric, such as eval_loss")


@dataclass(frozen=True)
class Candidate:
    """What is known of one checkpoint. ``verified``: its manifest was read back from the bucket and agrees."""

    name: str
    step: int
    verdict: str = Verdict.COMPLETE
    metrics: Dict[str, float] = field(default_factory=dict)
    pinned: bool = False
    verified: bool = False

    @property
    def usable(self) -> bool:
        """Whether the checkpoint is whole, resumable or not."""
        return self.verdict in (Verdict.COMPLETE, Verdict.WEIGHTS_ONLY)


@dataclass(frozen=True)
class Decision:
    """The fate of one checkpoint and one line that says why."""

    name: str
    step: int
    keep: bool
    reason: str


def decide(checkpoints: Sequence[Candidate], policy: Policy) -> List[Decision]:
    """The fate of each checkpoint, by step.

    Never deleted: the newest complete one, the newest usable one, the best by the policy's metric, a pinned one, one
    that may still be being written (incomplete and newer than every usable one), and, with a backup, one that is usable
    and not verified in the bucket. Deciding again over what is left deletes nothing more.
    """
    ordered = sorted(checkpoints, key=lambda item: (item.step, item.name))
    usable = [item for item in ordered if item.usable]
    complete = [item for item in ordered if item.verdict == Verdict.COMPLETE]
    last = {item.name for item in usable[-policy.keep_last :]} | {item.name for item in complete[-policy.keep_last :]}
    best = _best(usable, policy)
    newest_usable = usable[-1].step if usable else None
    return [_decide_one(item, policy, last, best, newest_usable) for item in ordered]


def _best(usable: List[Candidate], policy: Policy) -> Set[str]:
    if not policy.metric:
        return set()
    sign = 1.0 if policy.mode == "min" else -1.0
    measured = [item for item in usable if policy.metric in item.metrics]
    scored = [(sign * item.metrics[policy.metric], -item.step, item.name) for item in measured]
    return {name for _, _, name in sorted(scored)[: max(1, policy.keep_best)]}


def _decide_one(
    item: Candidate, policy: Policy, last: Set[str], best: Set[str], newest_usable: Optional[int]
) -> Decision:
    def keep(reason: str) -> Decision:
        return Decision(item.name, item.step, True, reason)

    if item.pinned:
        return keep("pinned")
    if not item.usable:
        if newest_usable is None or item.step > newest_usable:
            return keep(f"{item.verdict}, and nothing whole is newer: perhaps being written")
        return Decision(item.name, item.step, False, f"{item.verdict}, and step {newest_usable} is whole and newer")
    if item.name in last:
        return keep(f"one of the {policy.keep_last} newest")
    if item.name in best:
        return keep(f"one of the {max(1, policy.keep_best)} best by {policy.metric}")
    if policy.backup and not item.verified:
        return keep("not yet verified in the bucket")
    return Decision(item.name, item.step, False, "superseded" + (", verified in the bucket" if policy.backup else ""))
