"""What a user sees who writes a wrong file: everything at once, with line, key, value and fix."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_provider.config import Cluster, ConfigError, Recipe, list_recipes, load_cluster, load_recipe
from swift_provider.config.loading import parse
from swift_provider.config.values import parse_duration, split_oss

CONFIGS = Path(__file__).resolve().parents[3] / "include" / "configs"
LOCAL = {"SWIFT_LOCAL_PYTHON": "/env/bin/python", "SWIFT_LOCAL_DIR": "/local"}

GOOD_RECIPE = """\
name: nightly
swift:
  command: sft
  args: {model: Qwen/Qwen2.5-7B-Instruct, dataset: [/data/a.jsonl], deepspeed: zero3}
  env: {NCCL_SOCKET_IFNAME: eth0, NCCL_IB_TIMEOUT: 22}
cluster: two
schedule: "0 2 * * *"
max_runtime: 8h
checkpoints: {backup: oss://bucket/prefix/, keep_last: 3, keep_best: {metric: eval_loss, mode: min}}
"""


def faults_of(text: str, model: type = Recipe, environment: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(model, text, "recipes/x.yaml", environment or {})
    return [str(fault) for fault in caught.value.faults]


def test_a_good_recipe() -> None:
    recipe = parse(Recipe, GOOD_RECIPE, "recipes/x.yaml", {})
    assert recipe.max_runtime == 8 * 3600
    assert recipe.checkpoints.backup == "oss://bucket/prefix"
    assert recipe.swift.env["NCCL_IB_TIMEOUT"] == "22"


def test_all_faults_at_once_with_line_key_value_and_fix() -> None:
    text = """\
name: my recipe
swift:
  args: {model: m, output_dir: /x, dataset: [d]}
  envv: {A: b}
cluser: two
schedule: tonight
checkpoints: {backup: s3://bucket, keep_last: 0}
"""
    faults = faults_of(text)
    assert [fault.split(": ")[:2] for fault in faults] == [
        ["recipes/x.yaml:1", "name"],
        ["recipes/x.yaml:3", "swift.args"],
        ["recipes/x.yaml:4", "swift.envv"],
        ["recipes/x.yaml:5", "cluser"],
        ["recipes/x.yaml:6", "schedule"],
        ["recipes/x.yaml:7", "checkpoints.backup"],
        ["recipes/x.yaml:7", "checkpoints.keep_last"],
        ["recipes/x.yaml", "cluster"],
    ]
    text = "\n".join(faults)
    assert "did you mean 'cluster'?" in text
    assert "did you mean 'env'?" in text
    assert "'s3://bucket'" in text
    assert "oss://bucket/prefix" in text
    assert "is missing; add it" in text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("swift: {args: {dataset: [d]}}", "model: is needed"),
        ("swift: {args: {model: m}}", "dataset: is needed"),
        ("swift: {args: {model: m, dataset: d, --lr: 1}}", "without dashes"),
        ("swift: {args: {model: m, dataset: d, save_total_limit: 2}}", "keep_last decides"),
        ("swift: {args: {model: m, dataset: d}, env: {MASTER_ADDR: x}}", "follow from the cluster"),
        ("swift: {args: {model: m, dataset: d}, command: train}", "'rlhf', 'megatron sft'"),
    ],
)
def test_rules_of_the_swift_section(line: str, expected: str) -> None:
    assert expected in "\n".join(faults_of(f"name: x\ncluster: c\n{line}\n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a: [1", "is not YAML"), ("- a\n- b\n", "must be a mapping"), ("", "must be a mapping")],
)
def test_what_is_not_even_a_recipe(text: str, expected: str) -> None:
    assert expected in faults_of(text)[0]


def test_a_key_that_is_there_twice_is_told_and_not_lost() -> None:
    faults = faults_of("name: a\nname: b\ncluster: c\nswift: {args: {model: m, dataset: d}}\n")
    assert faults == ["recipes/x.yaml:2: name: is there twice (first in line 1)"]


def test_variables() -> None:
    text = "name: x\npython: ${PY}\nworkdir: ${DIR:-/var/x}\nnodes: [{name: a, ssh_conn_id: a}]\n"
    cluster = parse(Cluster, text, "c.yaml", {"PY": "/p"})
    assert (cluster.python, cluster.workdir) == ("/p", "/var/x")
    faults = faults_of(text, Cluster)
    assert "environment variable PY is not set" in faults[0]
    assert "python" in faults[0]


def test_a_node_is_there_once() -> None:
    text = "name: x\npython: /p\nnodes: [{name: a, ssh_conn_id: s}, {name: a, ssh_conn_id: s}]\n"
    assert "name a is there twice" in faults_of(text, Cluster)[0]


def test_files_by_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tiny-cpu'"):
        load_recipe("tiny-cpuu", CONFIGS)
    with pytest.raises(ConfigError, match="no such file"):
        load_cluster("../recipes/tiny-cpu", CONFIGS)


@pytest.mark.parametrize("name", list_recipes(CONFIGS))
def test_every_shipped_recipe_and_its_cluster_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in LOCAL.items():
        monkeypatch.setenv(variable, value)
    recipe = load_recipe(name, CONFIGS)
    assert recipe.name == name
    assert load_cluster(recipe.cluster, CONFIGS).name == recipe.cluster


def test_digest_follows_content() -> None:
    first = parse(Recipe, GOOD_RECIPE, "x", {})
    assert first.digest() == parse(Recipe, "# a comment\n" + GOOD_RECIPE, "y", {}).digest()
    assert first.digest() != parse(Recipe, GOOD_RECIPE.replace("keep_last: 3", "keep_last: 4"), "x", {}).digest()


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", None), ("90s", 90), ("10m", 600), ("1d 2h", 93600), ("1.5h", 5400)]
)
def test_durations(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ValueError, match="not a duration"):
            parse_duration(text)
    else:
        assert parse_duration(text) == seconds


@given(st.text(max_size=40))
def test_any_text_is_a_bucket_location_or_refused(text: str) -> None:
    try:
        bucket, key = split_oss(text)
    except ValueError:
        return
    assert text in (f"oss://{bucket}", f"oss://{bucket}/{key}")


def test_the_error_survives_the_way_from_a_worker() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Recipe, "name: x y\n", "x.yaml", {})
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert str(copy) == str(caught.value)
    assert copy.faults == caught.value.faults
