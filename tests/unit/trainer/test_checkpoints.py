"""The judge against every layout: complete as it is, not complete without any one needed file."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainer import layouts
from tests.unit.trainer.layouts import LAYOUTS
from trainer.checkpoints import judge, merge
from trainer.checkpoints.scan import check_safetensors, checkpoints, scan_checkpoint
from trainer.checkpoints.watch import CheckpointWatch
from trainer.protocol import CheckpointListing, CheckpointsReply, CheckpointsRequest, Verdict, dumps, loads


def scan(tmp_path, files, name="checkpoint-8"):
    return scan_checkpoint(str(layouts.write(tmp_path / name, files)))


def without(listing, *paths):
    return dataclasses.replace(listing, files=[entry for entry in listing.files if entry.path not in paths])


@pytest.mark.parametrize("name", LAYOUTS)
def test_complete_as_it_is(tmp_path, name):
    verdict = judge(scan(tmp_path, LAYOUTS[name][0]))
    assert (verdict.verdict, verdict.step, verdict.reason) == (Verdict.COMPLETE, 8, "whole and resumable")
    assert verdict.format == name.partition(",")[0]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("recorded", [True, False], ids=["world recorded", "world inferred"])
def test_incomplete_without_any_one_needed_file(tmp_path, name, recorded):
    files, needed = LAYOUTS[name]
    listing = scan(tmp_path, files)
    if not recorded and "not gathered" not in name and name != "megatron":
        listing = without(listing, "args.json")
        assert judge(listing).verdict == Verdict.COMPLETE
    for path in sorted(needed):
        verdict = judge(without(listing, path))
        assert verdict.verdict == Verdict.INCOMPLETE, path
        assert verdict.reason


@pytest.mark.parametrize("name", LAYOUTS)
def test_damaged_when_a_needed_file_is_empty(tmp_path, name):
    files, needed = LAYOUTS[name]
    listing = scan(tmp_path, files)
    for path in sorted(needed):
        emptied = [dataclasses.replace(e, size=0, text=e.text and "") if e.path == path else e for e in listing.files]
        verdict = judge(dataclasses.replace(listing, files=emptied))
        assert verdict.verdict in (Verdict.DAMAGED, Verdict.INCOMPLETE), path


@given(st.data())
def test_fewer_files_never_make_a_checkpoint_more_complete(tmp_path_factory, data):
    files, needed = LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))]
    listing = scan(tmp_path_factory.mktemp("subset"), files)
    kept = data.draw(st.sets(st.sampled_from(sorted(files))))
    verdict = judge(without(listing, *(set(files) - kept)))
    assert (verdict.verdict == Verdict.COMPLETE) <= (needed - kept <= {"args.json"})


@pytest.mark.parametrize("name", LAYOUTS)
def test_incomplete_without_its_weights_and_what_recorded_them(tmp_path, name):
    files, _ = LAYOUTS[name]
    traces = {path for path in files if path.startswith(("adapter_", "model", "config.json", "args.json"))}
    if name != "megatron":
        assert judge(without(scan(tmp_path, files), *traces)).verdict == Verdict.INCOMPLETE


def test_what_a_kill_during_a_save_leaves_is_incomplete(tmp_path):
    """All shards at full size, an empty ``latest``; no rng state, scheduler or trainer state: seen on real runs."""
    config = {"deepspeed": {"zero_optimization": {"stage": 2}}}
    files = {**layouts.common(60, config), **layouts.FULL, **layouts.deepspeed(60, 2), "latest": ""}
    for name in ("rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"):
        del files[name]
    verdict = judge(scan(tmp_path, files, "checkpoint-60"))
    assert verdict.verdict == Verdict.INCOMPLETE
    assert "trainer_state.json is missing" in verdict.reason
    assert "latest is empty" in verdict.reason


def test_saved_without_optimizer_state(tmp_path):
    files = {**layouts.common(8, {"save_only_model": True}), **layouts.FULL}
    assert judge(scan(tmp_path, files)).verdict == Verdict.WEIGHTS_ONLY
    files = {**layouts.common(8), **layouts.FULL}  # recorded: it was to be saved
    assert judge(scan(tmp_path / "b", files)).verdict == Verdict.INCOMPLETE
    files = {k: v for k, v in layouts.megatron(8, no_save_optim=True).items() if not k.startswith("iter_")}
    assert judge(scan(tmp_path / "c", files)).verdict == Verdict.WEIGHTS_ONLY


def test_a_trainer_state_of_another_step_is_damage(tmp_path):
    files = {**LAYOUTS["full+ddp"][0], "trainer_state.json": layouts.trainer_state(7)}
    verdict = judge(scan(tmp_path, files))
    assert verdict.verdict == Verdict.INCOMPLETE
    assert "step 7, not 8" in verdict.reason


def test_step_epoch_world_and_metrics(tmp_path):
    verdict = judge(scan(tmp_path, LAYOUTS["full+deepspeed, stage 3"][0]))
    assert (verdict.step, verdict.epoch, verdict.world_size) == (8, 0.08, 2)
    assert verdict.metrics == {"loss": 0.125, "eval_loss": 0.25, "eval_runtime": 0.1}


def test_an_evaluation_of_another_step_is_not_this_checkpoints(tmp_path):
    state = {"global_step": 8, "log_history": [{"step": 6, "eval_loss": 1.0}, {"step": 8, "loss": float("nan")}]}
    files = {**LAYOUTS["full+ddp"][0], "trainer_state.json": json.dumps(state)}
    verdict = judge(scan(tmp_path, files))
    assert (verdict.verdict, verdict.metrics) == (Verdict.COMPLETE, {})


@pytest.mark.parametrize("cut", [1, 8, 9, 40])
def test_a_truncated_safetensors_file_is_damage(tmp_path, cut):
    files = {**LAYOUTS["full+ddp"][0], "model.safetensors": layouts.safetensors()[:-cut]}
    verdict = judge(scan(tmp_path, files))
    assert verdict.verdict == Verdict.DAMAGED
    assert "model.safetensors is truncated" in verdict.reason


@given(st.binary(max_size=200))
def test_any_bytes_are_no_safetensors_file(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    path.write_bytes(data)
    check_safetensors(str(path), len(data))  # must not raise
    path.write_bytes(layouts.safetensors(len(data)) + data)
    assert check_safetensors(str(path), path.stat().st_size) is (data == b"")


# -- over nodes -------------------------------------------------------------------------------------------------


def test_nodes_without_a_shared_disk_hold_a_checkpoint_together(tmp_path):
    config = {"deepspeed": {"zero_optimization": {"stage": 2}}}
    files = {**layouts.common(8, config), **layouts.FULL, **layouts.deepspeed(8, 2)}
    second = {"rng_state_1.pth", "global_step8/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"}
    one = scan(tmp_path / "one", {k: v for k, v in files.items() if k not in second})
    two = scan(tmp_path / "two", {k: v for k, v in files.items() if k in second})
    assert [judge(one).verdict, judge(two).verdict] == [Verdict.INCOMPLETE] * 2
    (union,) = merge({"b": [two], "a": [one]})
    assert judge(union.listing).verdict == Verdict.COMPLETE
    assert union.holders["rng_state_1.pth"] == ["b"]
    assert union.holders["latest"] == ["a"]


def test_a_whole_copy_beats_a_broken_one_and_equal_ones_have_many_holders(tmp_path):
    good = scan(tmp_path / "a", LAYOUTS["full+ddp"][0])
    bad = scan(tmp_path / "b", {**LAYOUTS["full+ddp"][0], "model.safetensors": layouts.safetensors(500)[:-1]})
    (union,) = merge({"bad": [bad], "good": [good]})
    assert judge(union.listing).verdict == Verdict.COMPLETE
    assert union.holders["model.safetensors"] == ["good"]
    assert union.holders["config.json"] == ["bad", "good"]


def test_merging_goes_by_step(tmp_path):
    listings = [CheckpointListing(f"checkpoint-{step}") for step in (100, 20, 3)]
    assert [union.name for union in merge({"a": listings[:2], "b": listings[1:]})] == [
        "checkpoint-3",
        "checkpoint-20",
        "checkpoint-100",
    ]
    assert merge({}) == []


# -- reading ----------------------------------------------------------------------------------------------------


def test_the_verb_lists_by_step_and_follows_the_links(tmp_path):
    for step in (100, 20, 3):
        layouts.write(tmp_path / f"checkpoint-{step}", {"trainer_state.json": layouts.trainer_state(step)})
    (tmp_path / "checkpoint-3-merged").mkdir()
    (tmp_path / "checkpoint-7").symlink_to(tmp_path / "checkpoint-3")
    (tmp_path / "last-checkpoint").symlink_to("checkpoint-100")
    (tmp_path / "best").symlink_to(tmp_path / "checkpoint-20")
    reply = checkpoints(CheckpointsRequest(str(tmp_path)))
    assert [listing.name for listing in reply.checkpoints] == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]
    assert (reply.last, reply.best) == ("checkpoint-100", "checkpoint-20")
    assert loads(CheckpointsReply, dumps(reply)) == reply


def test_a_missing_folder_holds_no_checkpoints(tmp_path):
    assert checkpoints(CheckpointsRequest(str(tmp_path / "no"))) == CheckpointsReply()


def test_only_what_the_judge_needs_leaves_the_node(tmp_path):
    state = json.loads(layouts.trainer_state(5000))
    files = {**LAYOUTS["full+ddp"][0], "trainer_state.json": json.dumps({**state, "global_step": 8})}
    text = dumps(scan(tmp_path, files))
    assert "hf_secret" not in text
    assert len(text) < 20_000


def test_the_watch_reads_a_checkpoint_when_it_changes(tmp_path):
    watch = CheckpointWatch(str(tmp_path))
    assert watch.poll() == []
    files = dict(LAYOUTS["full+ddp"][0])
    late = files.pop("trainer_state.json")
    layouts.write(tmp_path / "checkpoint-8", files)
    assert watch.poll() == []
    layouts.write(tmp_path / "checkpoint-8", {"trainer_state.json": late})
    assert watch.poll() == ["checkpoint-8"]
    layouts.write(tmp_path / "checkpoint-16", {**files, "trainer_state.json": layouts.trainer_state(16)})
    assert watch.poll() == ["checkpoint-8", "checkpoint-16"]
    (tmp_path / "checkpoint-8" / "optimizer.pt").unlink()
    assert watch.poll() == ["checkpoint-16"]
