"""What the user wants kept, and what is known of a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Dict, Optional, Tuple

from trainer.protocol import Verdict


@dataclass(frozen=True)
class Policy:
    """What the user wants kept. A checkpoint that any rule wants stays, until ``max_bytes`` takes it again.

    Within each of the ``keep_runs`` newest runs (0: within every run): the ``keep_last`` newest, at least one; the
    ``keep_best`` best by ``metric`` (0: none), where ``mode`` is ``min`` or ``max``; each whose step is a multiple of
    ``keep_every`` (0: none). Over all runs: the first of each of the ``keep_daily``, ``keep_weekly`` and
    ``keep_monthly`` newest days, ISO weeks and months (UTC) that have one; those younger than ``keep_within`` seconds.

    ``max_bytes`` (0: no limit) lets the oldest go that no protection holds, until all together are no larger.
    With ``backup`` nothing is deleted whose manifest has not been verified in the bucket.

    Raises:
        ValueError: a number is negative, ``mode`` is neither, or ``keep_best`` lacks its ``metric``.
    """

    keep_last: int = 2
    keep_best: int = 0
    metric: str = ""
    mode: str = "min"
    backup: bool = False
    keep_runs: int = 0
    keep_every: int = 0
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_monthly: int = 0
    keep_within: float = 0.0
    max_bytes: int = 0

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last must be >= 1, got {self.keep_last}")
        names = ("keep_best", "keep_runs", "keep_every", "keep_daily", "keep_weekly", "keep_monthly", "keep_within")
        wrong = [f"{name} must be >= 0, got {getattr(self, name)}" for name in names if not getattr(self, name) >= 0]
        if self.max_bytes < 0:
            wrong.append(f"max_bytes must be >= 0 to keep anything, got {self.max_bytes}")
        if wrong:
            raise ValueError("; ".join(wrong))
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode must be min or max, got {self.mode!r}")
        if self.keep_best and not self.metric:
            raise ValueError("keep_best needs a metric, such as eval_loss")


@dataclass(frozen=True)
class Candidate:
    """What is known of one checkpoint.

    ``verified``: its manifest was read back from the bucket and agrees. ``created`` is in seconds since the epoch
    (``None``: not known), ``size`` in bytes. ``in_use`` says who uses it (``""``: nobody). Steps order the checkpoints
    of one ``run``; between runs their times do.
    """

    name: str
    step: int
    verdict: str = Verdict.COMPLETE
    metrics: Dict[str, float] = field(default_factory=dict)
    pinned: bool = False
    verified: bool = False
    run: str = ""
    created: Optional[float] = None
    size: int = 0
    in_use: str = ""

    @property
    def key(self) -> Tuple[str, str]:
        """What no other candidate has: run and name."""
        return self.run, self.name

    @property
    def usable(self) -> bool:
        """Whether the checkpoint is whole, resumable or not."""
        return self.verdict in (Verdict.COMPLETE, Verdict.WEIGHTS_ONLY)

    def score(self, metric: str) -> Optional[float]:
        """The value of a metric; ``None`` where it is missing, NaN or infinite: such a one is never the best."""
        value = self.metrics.get(metric)
        return value if value is not None and math.isfinite(value) else None
