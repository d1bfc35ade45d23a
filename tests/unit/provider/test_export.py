"""What is exported of a run, where, and every reason why not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_provider.config import ConfigError, Recipe
from swift_provider.operators.checkpoints import RunCheckpoint
from swift_provider.planning.arguments import check_arguments
from swift_provider.planning.catalogue import arguments_of
from swift_provider.planning.export import choose_checkpoint, export_dir, export_plan, node_with
from swift_provider.planning.launch import job_spec
from swift_provider.planning.plan import LaunchPlan
from tests.unit.provider.test_planning import cluster
from tests.unit.provider.test_planning import plan as make
from trainer.checkpoints import Judgement
from trainer.protocol import Owner, Verdict

MERGE = {"args": {"merge_lora": True}}


def recipe(export: Any, keep_best: Any = None, command: str = "sft", **args: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "r",
            "cluster": "c",
            "swift": {"command": command, "args": {"model": "/m", "dataset": ["d"], **args}},
            "checkpoints": {"backup": "oss://bucket/ckpt", "keep_best": keep_best},
            "export": export,
        }
    )


def plan(export: Any = MERGE, **more: Any) -> LaunchPlan:
    return make(recipe(export, **more), cluster(2, 4))


def checkpoint(step: int, verdict: str = Verdict.COMPLETE, holders: Any = None, **metrics: float) -> RunCheckpoint:
    name = f"checkpoint-{step}"
    judgement = Judgement(name, verdict, "adapter+ddp", step, metrics=metrics)
    return RunCheckpoint(name, step, judgement, {}, holders or {}, {})


@pytest.mark.parametrize(
    ("export", "args", "problem"),
    [
        ({"args": {}}, {}, "say what to make: merge_lora: true, or quant_method with quant_bits"),
        ({"args": {"merge_lora": False}}, {}, "say what to make"),
        ({"args": {"quant_method": "bnb"}}, {}, "quant_bits: is needed with quant_method bnb"),
        ({"args": {"quant_method": "awq", "quant_bits": 4}}, {}, "dataset: quant_method awq needs rows to calibrate"),
        ({"args": {"merge_lora": True, "output_dir": "/x"}}, {}, "output_dir: leave it out"),
        ({"args": {"merge_lora": True, "push_to_hub": True}}, {}, "push_to_hub: leave it out"),
        ({"args": {"merge_lora": True, "--x": 1}}, {}, "--x: write it without dashes"),
        ({"args": {"merge_lora": True, "quant_bitz": 4}}, {}, "export.args.quant_bitz: export has no such argument"),
        ({"args": {"quant_method": "awk", "quant_bits": 4}}, {}, "one of awq, gptq, bnb, fp8"),
        (MERGE, {"tuner_type": "full"}, "export.args.merge_lora: tuner_type full trains the whole model"),
        ({**MERGE, "checkpoint": "best"}, {}, "best needs checkpoints.keep_best"),
        ({**MERGE, "checkpoint": "last"}, {}, "export.checkpoint"),
        (MERGE, {"command": "megatron sft", "tuner_type": "lora"}, "`swift export` does not take"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_runs(export: Any, args: Any, problem: str) -> None:
    with pytest.raises((ConfigError, ValueError)) as caught:
        plan(export, **args)
    assert problem in str(caught.value)


def test_an_fp8_model_needs_no_bits() -> None:
    assert plan({"args": {"quant_method": "fp8"}}, tuner_type="full").export is not None


def test_a_recipe_without_export_has_the_hash_that_it_always_had() -> None:
    assert recipe(None).digest() != recipe(MERGE).digest()
    content = recipe(None).model_dump(mode="json")
    assert content.pop("export") is None
    assert Recipe.model_validate(content).digest() == recipe(None).digest()


steps = st.lists(
    st.tuples(
        st.sampled_from([Verdict.COMPLETE, Verdict.WEIGHTS_ONLY, Verdict.INCOMPLETE, Verdict.DAMAGED]),
        st.one_of(st.none(), st.floats(0, 9)),
    )
)


@given(steps, st.sampled_from(["newest", "best"]), st.sampled_from(["min", "max"]))
def test_only_a_whole_checkpoint_is_chosen_and_the_right_one(found: Any, which: str, mode: str) -> None:
    best = {"metric": "eval_loss", "mode": mode}
    checkpoints = [
        checkpoint(step, verdict, **({} if loss is None else {"eval_loss": loss}))
        for step, (verdict, loss) in enumerate(found, 1)
    ]
    chosen = choose_checkpoint(plan({**MERGE, "checkpoint": which}, keep_best=best), checkpoints)
    whole = [item for item in checkpoints if item.whole and (which == "newest" or "eval_loss" in item.metrics)]
    assert (chosen is None) == (not whole)
    if chosen is None:
        return
    assert chosen in whole
    for other in whole:
        if which == "newest":
            assert other.step <= chosen.step
        elif mode == "min":
            assert other.metrics["eval_loss"] >= chosen.metrics["eval_loss"]
        else:
            assert other.metrics["eval_loss"] <= chosen.metrics["eval_loss"]


def test_the_node_is_one_that_holds_all_weights() -> None:
    both = ["n0", "n1"]
    held = {"adapter_config.json": both, "adapter_model.safetensors": ["n1"], "rng_state_0.pth": ["n0"]}
    node = node_with(plan(), checkpoint(1, holders=held))
    assert node is not None
    assert node.name == "n1"
    parts = {"model-00001-of-00002.safetensors": ["n0"], "model-00002-of-00002.safetensors": ["n1"]}
    assert node_with(plan(), checkpoint(1, holders=parts)) is None


def test_an_adapter_is_exported_on_its_model_and_a_whole_model_by_itself() -> None:
    trained = plan(template="chatml", torch_dtype="bfloat16", external_plugins=["{job_dir}/x.py", "/mine.py"])
    merged = export_plan(trained, trained.nodes[1], "checkpoint-7", adapter=True)
    assert merged.program == ("swift", "export")
    assert merged.args == {
        "model": "/m",
        "adapters": [f"{trained.nodes[1].output_dir}/checkpoint-7"],
        "template": "chatml",
        "torch_dtype": "bfloat16",
        "external_plugins": ["/mine.py"],
        "merge_lora": True,
    }
    assert check_arguments("export", merged.args, arguments_of("export")) == {}
    spec = job_spec(merged, merged.nodes[0], job_id="j", owner=Owner(), staged={"/m": "/cache/m"})
    assert spec.argv[1:4] == ["-m", "swift.cli.main", "export"]
    assert spec.output_dir == f"{export_dir(trained)}/checkpoint-7"
    assert "model: /cache/m" in spec.files["swift.yaml"]
    assert (spec.port, spec.world_size, "MASTER_ADDR" in spec.env) == (None, 1, False)

    full = plan({"args": {"quant_method": "fp8"}}, tuner_type="full")
    alone = export_plan(full, full.nodes[0], "checkpoint-7", adapter=False).args
    assert alone == {"model": f"{full.nodes[0].output_dir}/checkpoint-7", "quant_method": "fp8"}
