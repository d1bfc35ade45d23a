"""The decision: protections first, then what the rules want, then the budget."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Callable, Dict, Hashable, Iterable, List, Optional, Sequence, Tuple

from trainer.protocol import Verdict
from trainer.retention.policy import Candidate, Policy

Key = Tuple[str, str]


@dataclass(frozen=True)
class Decision:
    """The fate of one checkpoint and one line that says why. ``size`` is in bytes; ``protected``: no rule decides."""

    name: str
    step: int
    keep: bool
    reason: str
    run: str = ""
    size: int = 0
    protected: bool = False

    @property
    def key(self) -> Key:
        """Run and name."""
        return self.run, self.name


def decide(
    checkpoints: Sequence[Candidate], policy: Policy, now: float = 0.0, current: Optional[str] = None
) -> List[Decision]:
    """The fate of each checkpoint, oldest first.

    Never deleted, whatever the policy says: a pinned one; one in use; one that may still be being written (incomplete
    and newer than every usable one of its run); the newest complete and the newest usable one, of all and of the run
    ``current``; the best of all by the policy's metric; and, with a backup, one that is usable and not verified in
    the bucket. Deciding again over what is left deletes nothing more.

    Args:
        checkpoints: of any number of runs.
        policy: what is wanted.
        now: seconds since the epoch, for ``keep_within``.
        current: the run that this is decided for; it may still resume.
    """
    ages = _ages(checkpoints)
    ordered = sorted(checkpoints, key=lambda item: (ages[item.key], item.run, item.step, item.name))
    usable = [item for item in ordered if item.usable]
    protected = _protections(ordered, usable, policy, current)
    wanted = _wishes(usable, ages, policy, now)
    newest = {item.run: item.step for item in sorted(usable, key=lambda item: item.step)}
    decisions = [_decide_one(item, policy, protected, wanted, newest.get(item.run)) for item in ordered]
    return _within_budget(decisions, policy.max_bytes)


def over_budget(decisions: Iterable[Decision], policy: Policy) -> int:
    """How many bytes more than ``max_bytes`` stay, because protections hold them; 0 without a budget."""
    kept = sum(decision.size for decision in decisions if decision.keep)
    return max(0, kept - policy.max_bytes) if policy.max_bytes else 0


def _ages(checkpoints: Iterable[Candidate]) -> Dict[Key, float]:
    """When each was made, such that within a run a later step is never older, whatever the clocks said."""
    ages: Dict[Key, float] = {}
    latest: Dict[str, float] = {}
    for item in sorted(checkpoints, key=lambda item: (item.step, item.name)):
        latest[item.run] = max(latest.get(item.run, 0.0), item.created or 0.0)
        ages[item.key] = latest[item.run]
    return ages


# -- what no rule may take ----------------------------------------------------------------------------------------


def _protections(
    ordered: List[Candidate], usable: List[Candidate], policy: Policy, current: Optional[str]
) -> Dict[Key, str]:
    found: Dict[Key, str] = {}
    for run in (None, current):
        own = [item for item in usable if run is None or item.run == run]
        complete = [item for item in own if item.verdict == Verdict.COMPLETE]
        for item in own[-1:] + complete[-1:]:
            found[item.key] = "the newest"
    for item in _best(usable, policy, 1):
        found[item.key] = f"the best by {policy.metric}"
    for item in ordered:
        if policy.backup and item.usable and not item.verified:
            found[item.key] = "not yet verified in the bucket"
        if item.in_use:
            found[item.key] = item.in_use
        if item.pinned:
            found[item.key] = "pinned"
    return found


# -- what the rules want ------------------------------------------------------------------------------------------


def _wishes(usable: List[Candidate], ages: Dict[Key, float], policy: Policy, now: float) -> Dict[Key, str]:
    found: Dict[Key, str] = {}

    def want(items: Iterable[Candidate], reason: str) -> None:
        for item in items:
            found.setdefault(item.key, reason)

    runs = _newest_runs(usable, ages, policy.keep_runs)
    for own in runs:
        complete = [item for item in own if item.verdict == Verdict.COMPLETE]
        want(own[-policy.keep_last :] + complete[-policy.keep_last :], f"one of the {policy.keep_last} newest")
    for own in runs:
        count = max(1, policy.keep_best)
        want(_best(own, policy, count), f"one of the {count} best by {policy.metric}")
        if policy.keep_every:
            want([i for i in own if i.step % policy.keep_every == 0], f"its step is a multiple of {policy.keep_every}")
    dated = [item for item in usable if ages[item.key] > 0]
    for name, count, period in (
        ("day", policy.keep_daily, _day),
        ("week", policy.keep_weekly, _week),
        ("month", policy.keep_monthly, _month),
    ):
        want(_firsts(dated, ages, period, count), f"the first of its {name}")
    if policy.keep_within > 0:
        want([item for item in dated if now - ages[item.key] < policy.keep_within], "young enough")
    return found


def _newest_runs(usable: List[Candidate], ages: Dict[Key, float], count: int) -> List[List[Candidate]]:
    """The checkpoints of each of the ``count`` newest runs, by step; 0: of all runs."""
    runs: Dict[str, List[Candidate]] = {}
    for item in sorted(usable, key=lambda item: (item.step, item.name)):
        runs.setdefault(item.run, []).append(item)
    ordered = sorted(runs.values(), key=lambda own: (ages[own[-1].key], own[-1].run))
    return ordered[-count:] if count else ordered


def _best(usable: List[Candidate], policy: Policy, count: int) -> List[Candidate]:
    """The best by the metric; of two equal ones the later step counts as better."""
    if not policy.metric:
        return []
    sign = 1.0 if policy.mode == "min" else -1.0
    scored = []
    for item in usable:
        score = item.score(policy.metric)
        if score is not None:
            scored.append((sign * score, -item.step, item.run, item.name, item))
    return [row[-1] for row in sorted(scored, key=lambda row: row[:-1])[:count]]


def _day(moment: datetime) -> Hashable:
    return moment.date()


def _week(moment: datetime) -> Hashable:
    return moment.isocalendar()[:2]


def _month(moment: datetime) -> Hashable:
    return moment.year, moment.month


def _firsts(
    dated: List[Candidate], ages: Dict[Key, float], period: Callable[[datetime], Hashable], count: int
) -> List[Candidate]:
    first: Dict[Hashable, Candidate] = {}
    for item in dated:  # oldest first
        first.setdefault(period(datetime.fromtimestamp(ages[item.key], timezone.utc)), item)
    return list(first.values())[-count:] if count else []


# -- the verdict --------------------------------------------------------------------------------------------------


def _decide_one(
    item: Candidate, policy: Policy, protected: Dict[Key, str], wanted: Dict[Key, str], newest: Optional[int]
) -> Decision:
    def verdict(keep: bool, reason: str, hold: bool = False) -> Decision:
        return Decision(item.name, item.step, keep, reason, item.run, item.size, hold)

    protection = protected.get(item.key)
    if item.pinned or item.in_use:
        return verdict(True, str(protection), True)
    if not item.usable:
        if newest is None or item.step > newest:
            return verdict(True, f"{item.verdict}, and nothing whole is newer: perhaps being written", True)
        return verdict(False, f"{item.verdict}, and step {newest} is whole and newer")
    if protection or item.key in wanted:
        return verdict(True, wanted.get(item.key) or str(protection), protection is not None)
    return verdict(False, "superseded" + (", verified in the bucket" if policy.backup else ""))


def _within_budget(decisions: List[Decision], max_bytes: int) -> List[Decision]:
    """Let the oldest go that nothing protects, until what stays fits."""
    if not max_bytes:
        return decisions
    total = sum(decision.size for decision in decisions if decision.keep)
    result = []
    for item in decisions:
        if item.keep and not item.protected and total > max_bytes:
            total -= item.size
            reason = f"over the budget of {max_bytes / 2**30:.4g} GiB; else {item.reason}"
            item = Decision(item.name, item.step, False, reason, item.run, item.size)
        result.append(item)
    return result
