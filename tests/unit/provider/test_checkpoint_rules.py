"""The recipe's section ``checkpoints``: rules for each place, how objects are stored, and which runs are in use."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from swift_provider.config.bucket import options_of, target_of
from swift_provider.config.checkpoints import CheckpointPolicy, Storage
from swift_provider.planning.retention import UNKNOWN_RUN_S, policy_of, runs_in_use, sees_other_runs
from trainer.protocol import Manifest, ObjectOptions
from trainer.retention import Policy
from trainer.store.options import headers_of


def policy(**given) -> CheckpointPolicy:
    return CheckpointPolicy.model_validate({"backup": "oss://bucket/x", **given})


def test_an_old_section_means_what_it_meant() -> None:
    old = policy(keep_last=2, keep_best={"metric": "eval_loss"})
    for where in ("nodes", "bucket"):
        made = policy_of(old, where)
        assert made == Policy(keep_last=2, keep_best=1, metric="eval_loss", backup=where == "nodes")
        assert not sees_other_runs(made)


def test_a_place_changes_only_what_it_names_also_after_a_plans_journey_through_json() -> None:
    given = policy(
        keep_last=2, keep_best={"metric": "acc", "mode": "max", "count": 3}, keep_monthly=12, keep_within="2d",
        nodes={"keep_runs": 1, "keep_monthly": 0, "max_gib": 0.5}, bucket={"keep_last": 5},
    )  # fmt: skip
    for again in (given, CheckpointPolicy.model_validate(given.model_dump(mode="json"))):
        nodes, bucket = policy_of(again, "nodes"), policy_of(again, "bucket")
        assert (nodes.keep_last, nodes.keep_runs, nodes.keep_monthly, nodes.max_bytes) == (2, 1, 0, 2**29)
        assert (bucket.keep_last, bucket.keep_runs, bucket.keep_monthly, bucket.max_bytes) == (5, 0, 12, 0)
        assert (nodes.keep_best, nodes.metric, nodes.mode, nodes.keep_within) == (3, "acc", "max", 172800.0)


def test_the_runs_own_keep_last_holds_in_both_places() -> None:
    given = policy(keep_last=2, nodes={"keep_last": 1, "keep_runs": 4}).with_keep_last(7)
    assert [policy_of(given, where).keep_last for where in ("nodes", "bucket")] == [7, 7]
    assert policy_of(given, "nodes").keep_runs == 4


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"nodes": {"keep_lst": 1}}, "nodes.keep_lst"),
        ({"bucket": {"backup": "oss://other/x"}}, "bucket.backup"),
        ({"max_gib": 0}, "max_gib"),
        ({"keep_within": "soon"}, "is not a duration"),
        ({"storage": {"encryption": "ROT13"}}, "storage.encryption"),
        ({"storage": {"storage_class": "Archive"}}, "storage.storage_class"),
        ({"storage": {"kms_key_id": "k"}}, "kms_key_id needs encryption: KMS"),
        ({"storage": {"tags": {str(n): "x" for n in range(11)}}}, "at most 10"),
        ({"storage": {"tags": {"": "x"}}}, "a key has 1 to 128 characters"),
    ],
)
def test_what_is_wrong_is_named(given, problem) -> None:
    with pytest.raises(ValidationError) as caught:
        policy(**given)
    assert problem in str(caught.value)


def test_options_become_headers_and_nothing_becomes_none() -> None:
    given = Storage(encryption="KMS", kms_key_id="k", storage_class="IA", tags={"b": "1 2", "a": 3})  # type: ignore[dict-item]
    assert headers_of(options_of(given)) == {
        "x-oss-server-side-encryption": "KMS",
        "x-oss-server-side-encryption-key-id": "k",
        "x-oss-storage-class": "IA",
        "x-oss-tagging": "a=3&b=1+2",
    }
    assert headers_of(ObjectOptions()) == headers_of(options_of(Storage())) == {}


KEYS = {"access_key_id": "k", "access_key_secret": "s", "region": "oss-cn-hangzhou"}


def test_the_internal_endpoint_is_one_word() -> None:
    assert target_of("oss://bucket/a/b", "x", KEYS).endpoint == "https://oss-cn-hangzhou.aliyuncs.com"
    for word in (True, "true", "True"):
        made = target_of("oss://bucket/a/b", "x", {**KEYS, "internal": word})
        assert made.endpoint == "https://oss-cn-hangzhou-internal.aliyuncs.com"
    with pytest.raises(ValueError, match="endpoint and internal exclude each other"):
        target_of("oss://bucket/a", "x", {**KEYS, "internal": True, "endpoint": "https://e"})
    with pytest.raises(ValueError, match="internal must be true or false, is 'maybe'"):
        target_of("oss://bucket/a", "x", {**KEYS, "internal": "maybe"})


def manifest(run: str, day: int) -> Manifest:
    return Manifest(
        "checkpoint-8", 8, "f", "complete", [], dag_id="d", run_id=run, created_at=f"2026-11-{day:02}T00:00:00+00:00"
    )


def test_a_run_is_in_use_while_a_task_of_it_may_run() -> None:
    from datetime import UTC, datetime

    now = datetime(2026, 11, 9, 1, tzinfo=UTC).timestamp()
    stored = [manifest("ended", 9), manifest("busy", 1), manifest("cleared", 1), manifest("own", 9),
              manifest("strange", 1), manifest("strange", 3), manifest("gone", 1)]  # fmt: skip
    states = {
        ("d", "ended"): {"train": "success", "prune": "failed", "backup": "skipped"},
        ("d", "busy"): {"train": "success", "prune": "running"},
        ("d", "cleared"): {"train": None},
    }
    used = runs_in_use(stored, states, ("d", "own"), now)
    assert set(used) == {("d", "busy"), ("d", "cleared"), ("d", "strange")}
    assert used["d", "cleared"] == "its run is under way (train is to come)"
    assert UNKNOWN_RUN_S == 7 * 86400
