"""The rules of retention one by one, over one run and over several, and what all of them together may never do."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.protocol import Verdict
from trainer.retention import Candidate, Policy, decide, over_budget

DAY = 86400.0
MONDAY = datetime(2026, 11, 2, tzinfo=UTC).timestamp()


def nights(count: int, **more) -> list[Candidate]:
    """Two checkpoints a night, one run a night, from a Monday on."""
    return [
        Candidate(f"checkpoint-{step}", step, run=f"night-{day:02}", created=MONDAY + day * DAY + step, size=10, **more)
        for day in range(count)
        for step in (10, 20)
    ]


def kept(items, policy, now=MONDAY + 400 * DAY, current=None):
    return [(int(d.run[-2:]), d.step) for d in decide(items, policy, now, current) if d.keep]


def test_without_a_rule_over_runs_each_run_keeps_its_newest():
    assert kept(nights(3), Policy(keep_last=1)) == [(0, 20), (1, 20), (2, 20)]


def test_only_the_newest_runs_keep_theirs():
    assert kept(nights(5), Policy(keep_last=2, keep_runs=2)) == [(3, 10), (3, 20), (4, 10), (4, 20)]


def test_the_first_of_each_day_week_and_month():
    last = (59, 20)
    policy = Policy(keep_last=1, keep_runs=1)
    assert kept(nights(60), replace(policy, keep_daily=3)) == [(57, 10), (58, 10), (59, 10), last]
    assert kept(nights(60), replace(policy, keep_weekly=3)) == [(42, 10), (49, 10), (56, 10), last]
    # 2 November is a Monday, so day 29 is 1 December and day 60 would be 1 January.
    assert kept(nights(60), replace(policy, keep_monthly=12)) == [(0, 10), (29, 10), last]


def test_every_so_many_steps_and_the_young():
    policy = Policy(keep_last=1, keep_runs=1)
    assert kept(nights(2), replace(policy, keep_every=10)) == [(1, 10), (1, 20)]
    assert kept(nights(4), replace(policy, keep_within=2 * DAY), MONDAY + 4 * DAY) == [
        (2, 10),
        (2, 20),
        (3, 10),
        (3, 20),
    ]


def test_the_best_of_each_run_and_the_best_of_all():
    losses = {(0, 10): 0.1, (0, 20): 0.5, (1, 10): 0.7, (1, 20): 0.6, (2, 10): 0.9, (2, 20): float("nan")}
    items = [replace(i, metrics={"eval_loss": losses[int(i.run[-2:]), i.step]}) for i in nights(3)]
    best = Policy(keep_last=1, keep_best=1, metric="eval_loss")
    assert kept(items, best) == [(0, 10), (0, 20), (1, 20), (2, 10), (2, 20)]
    assert kept(items, replace(best, keep_runs=1)) == [(0, 10), (2, 10), (2, 20)]


def test_a_budget_takes_the_oldest_first_and_never_what_is_protected():
    items = nights(3)
    assert kept(items, Policy(keep_last=2, max_bytes=35)) == [(1, 20), (2, 10), (2, 20)]
    pinned = [replace(items[0], pinned=True), *items[1:]]
    policy = Policy(keep_last=2, max_bytes=15)
    assert kept(pinned, policy) == [(0, 10), (2, 20)]
    assert over_budget(decide(pinned, policy), policy) == 5
    [first, *_] = [d for d in decide(items, Policy(keep_last=2, max_bytes=50)) if not d.keep]
    assert first.reason == "over the budget of 4.657e-08 GiB; else one of the 2 newest"


def test_a_run_that_is_under_way_keeps_all_and_so_does_the_asking_run_its_newest():
    items = [replace(i, in_use="its run is under way") if i.run == "night-00" else i for i in nights(3)]
    policy = Policy(keep_last=1, keep_runs=1)
    assert kept(items, policy) == [(0, 10), (0, 20), (2, 20)]
    assert kept(items, policy, current="night-01") == [(0, 10), (0, 20), (1, 20), (2, 20)]


def test_what_is_half_written_in_one_run_is_judged_by_that_run_alone():
    items = [*nights(2), Candidate("checkpoint-30", 30, Verdict.INCOMPLETE, run="night-00", created=MONDAY + 40)]
    assert (0, 30) in kept(items, Policy(keep_last=1, keep_runs=1))


# -- any set of runs ------------------------------------------------------------------------------------------------

VERDICTS = st.sampled_from([Verdict.COMPLETE] * 4 + [Verdict.WEIGHTS_ONLY, Verdict.INCOMPLETE, Verdict.DAMAGED])
METRICS = st.dictionaries(st.just("eval_loss"), st.floats(allow_nan=True, allow_infinity=True), max_size=1)


@st.composite
def several_runs(draw):
    items = []
    for run in range(draw(st.integers(1, 5))):
        steps = sorted(draw(st.lists(st.integers(1, 40), unique=True, max_size=6)))
        start = draw(st.floats(0, 100)) * DAY
        for step in steps:
            item = Candidate(f"checkpoint-{step}", step, draw(VERDICTS), draw(METRICS), draw(st.booleans()))
            item = replace(item, verified=draw(st.booleans()), run=f"run-{run}", created=MONDAY + start + step * 3600)
            used = draw(st.sampled_from(["", "", "", "a job reads it"]))
            items.append(replace(item, size=draw(st.integers(0, 50)), in_use=used))
    return draw(st.permutations(items))


POLICIES = st.builds(
    Policy,
    keep_last=st.integers(1, 3),
    keep_best=st.integers(0, 2),
    metric=st.just("eval_loss"),
    mode=st.sampled_from(["min", "max"]),
    backup=st.booleans(),
    keep_runs=st.integers(0, 3),
    keep_every=st.integers(0, 5),
    keep_daily=st.integers(0, 3),
    keep_weekly=st.integers(0, 3),
    keep_monthly=st.integers(0, 2),
    keep_within=st.sampled_from([0.0, DAY, 50 * DAY]),
    max_bytes=st.sampled_from([0, 1, 60, 200]),
)
CURRENT = st.sampled_from([None, "run-0", "run-1"])
NOW = MONDAY + 101 * DAY


@given(several_runs(), POLICIES, CURRENT)
def test_what_no_rule_and_no_budget_may_take(items, policy, current):
    decisions = {decision.key: decision for decision in decide(items, policy, NOW, current)}
    assert set(decisions) == {item.key for item in items}
    deleted = [item for item in items if not decisions[item.key].keep]
    for item in deleted:
        assert not item.pinned
        assert not item.in_use
        assert item.verified or not policy.backup or not item.usable
        assert item.usable or any(o.usable and o.run == item.run and o.step > item.step for o in items)
    for run in (None, current):
        own = [item for item in items if run in (None, item.run)]
        for group in ([i for i in own if i.usable], [i for i in own if i.verdict == Verdict.COMPLETE]):
            assert not group or any(item not in deleted for item in group)
    scores = [item.score("eval_loss") for item in items if item.usable and item.score("eval_loss") is not None]
    if scores:
        best = min(scores) if policy.mode == "min" else max(scores)
        assert any(item.score("eval_loss") == best and item not in deleted for item in items if item.usable)
    newest = {}
    for item in sorted(items, key=lambda item: item.step):
        if item.verdict == Verdict.COMPLETE:
            newest[item.run] = item
    if current in newest:
        assert newest[current] not in deleted


@given(several_runs(), POLICIES, CURRENT)
def test_deciding_again_over_what_is_left_deletes_nothing(items, policy, current):
    left = {decision.key for decision in decide(items, policy, NOW, current) if decision.keep}
    again = decide([item for item in items if item.key in left], policy, NOW, current)
    assert all(decision.keep for decision in again)


@given(several_runs(), POLICIES)
def test_the_budget_holds_unless_protections_break_it(items, policy):
    decisions = decide(items, policy, NOW)
    if over_budget(decisions, policy):
        assert all(decision.protected for decision in decisions if decision.keep)


@given(several_runs(), POLICIES)
def test_the_order_in_which_checkpoints_are_found_does_not_matter(items, policy):
    assert decide(items, policy, NOW) == decide(sorted(items, key=lambda item: item.key), policy, NOW)


@pytest.mark.parametrize("name", ["keep_runs", "keep_every", "keep_daily", "keep_within", "max_bytes"])
def test_a_negative_number_is_named(name):
    with pytest.raises(ValueError, match=name):
        Policy(**{name: -1})
