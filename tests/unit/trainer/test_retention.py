"""What retention may never do, over any set of checkpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.protocol import Verdict
from trainer.retention import Candidate, Policy, decide

VERDICTS = st.sampled_from(
    [Verdict.COMPLETE, Verdict.COMPLETE, Verdict.WEIGHTS_ONLY, Verdict.INCOMPLETE, Verdict.DAMAGED]
)


@st.composite
def candidates(draw):
    steps = draw(st.lists(st.integers(1, 10**6), unique=True, max_size=12))
    return [
        Candidate(
            f"checkpoint-{step}",
            step,
            draw(VERDICTS),
            draw(st.dictionaries(st.sampled_from(["eval_loss", "loss"]), st.floats(-5, 5), max_size=2)),
            draw(st.booleans()),
            draw(st.booleans()),
        )
        for step in steps
    ]


POLICIES = st.builds(
    Policy,
    keep_last=st.integers(1, 5),
    keep_best=st.integers(0, 3),
    metric=st.just("eval_loss"),
    mode=st.sampled_from(["min", "max"]),
    backup=st.booleans(),
)


@given(candidates(), POLICIES)
def test_what_is_never_deleted(items, policy):
    decisions = {decision.name: decision for decision in decide(items, policy)}
    deleted = [item for item in items if not decisions[item.name].keep]
    assert set(decisions) == {item.name for item in items}
    complete = [item for item in items if item.verdict == Verdict.COMPLETE]
    usable = [item for item in items if item.usable]
    if complete:
        assert max(complete, key=lambda item: item.step) not in deleted
    scored = [item for item in usable if "eval_loss" in item.metrics]
    if scored:
        best = (min if policy.mode == "min" else max)(item.metrics["eval_loss"] for item in scored)
        assert any(item.metrics["eval_loss"] == best and item not in deleted for item in scored)
    for item in deleted:
        assert not item.pinned
        assert item.verified or not policy.backup or not item.usable
        assert item.usable or any(other.usable and other.step > item.step for other in items)
    assert len([item for item in usable if item not in deleted]) >= min(policy.keep_last, len(usable))


@given(candidates(), POLICIES)
def test_deciding_again_deletes_nothing_more(items, policy):
    kept = {decision.name for decision in decide(items, policy) if decision.keep}
    again = decide([item for item in items if item.name in kept], policy)
    assert all(decision.keep for decision in again)


@given(candidates(), POLICIES)
def test_each_decision_has_a_reason_and_the_order_is_by_step(items, policy):
    decisions = decide(items, policy)
    assert all(decision.reason for decision in decisions)
    assert [decision.step for decision in decisions] == sorted(item.step for item in items)


def test_an_ordinary_night():
    items = [
        Candidate("checkpoint-10", 10, metrics={"eval_loss": 0.1}, verified=True),
        Candidate("checkpoint-20", 20, metrics={"eval_loss": 0.5}, verified=True),
        Candidate("checkpoint-30", 30, metrics={"eval_loss": 0.4}, verified=False),
        Candidate("checkpoint-35", 35, Verdict.INCOMPLETE),
        Candidate("checkpoint-40", 40, metrics={"eval_loss": 0.3}, verified=True),
        Candidate("checkpoint-50", 50, Verdict.INCOMPLETE),
    ]
    decisions = decide(items, Policy(keep_last=1, keep_best=1, metric="eval_loss", backup=True))
    assert [(decision.step, decision.keep, decision.reason) for decision in decisions] == [
        (10, True, "one of the 1 best by eval_loss"),
        (20, False, "superseded, verified in the bucket"),
        (30, True, "not yet verified in the bucket"),
        (35, False, "incomplete, and step 40 is whole and newer"),
        (40, True, "one of the 1 newest"),
        (50, True, "incomplete, and nothing whole is newer: perhaps being written"),
    ]


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_best": -1}, {"mode": "best"}, {"keep_best": 1}])
def test_a_wrong_policy_is_refused(wrong):
    with pytest.raises(ValueError, match=r"keep|mode"):
        Policy(**wrong)


def test_a_metric_that_is_no_number_never_makes_a_checkpoint_the_best() -> None:
    nan = float("nan")
    values = {1: 0.5, 2: nan, 3: nan, 4: 0.7}
    candidates = [Candidate(f"checkpoint-{step}", step, metrics={"eval_loss": value}) for step, value in values.items()]
    for order in (candidates, candidates[::-1]):
        decisions = {item.step: item for item in decide(order, Policy(keep_last=1, keep_best=1, metric="eval_loss"))}
        assert [step for step, item in decisions.items() if item.keep] == [1, 4]
