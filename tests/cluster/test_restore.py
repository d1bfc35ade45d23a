"""Checkpoints that come back to nodes, and what housekeeping removes from nodes and bucket."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from swift_provider.exceptions import RestoreFailed
from swift_provider.operators.cleanup import CleanUpOperator
from swift_provider.operators.restore import RestoreOperator
from tests.cluster.buckets import NODES, SECRET, Run
from tests.cluster.sites import trainer_python
from trainer import records, store
from trainer.paths import NodePaths
from trainer.protocol import JobState, Phase


@pytest.fixture
def configs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's recipe and cluster as files."""
    folder, site = tmp_path / "configs", run.site
    nodes = [
        {"name": node.name, "ssh_conn_id": site.conn_id(node.name), "slots": 1, "workdir": site.workdirs[node.name]}
        for node in site.nodes
    ]
    cluster = {"name": "c", "device": "cpu", "python": str(trainer_python()), "nodes": nodes}
    recipe = {"name": "r", "cluster": "c", "swift": {"args": {"model": "m/m", "dataset": ["d/d"]}}}
    for kind, value in (("clusters", cluster), ("recipes", {**recipe, "checkpoints": {"backup": "oss://bucket/ckpt"}})):
        (folder / kind).mkdir(parents=True)
        (folder / kind / f"{value['name']}.yaml").write_text(yaml.safe_dump(value))
    monkeypatch.setenv("SWIFT_CONFIG_DIR", str(folder))
    return folder


def restore(**given: Any) -> Any:
    return RestoreOperator(task_id="restore", **{"recipe": "r", "checkpoint": "latest", **given}).execute({})


def test_each_node_gets_the_whole_checkpoint(run: Run, configs: Path) -> None:
    content = run.save(8)
    run.backup()
    answer = restore()
    assert answer["checkpoint"] == "oss://bucket/ckpt/dag/run/checkpoint-8"
    assert set(answer["paths"]) == set(NODES)
    for node, path in answer["paths"].items():
        assert path == f"{run.site.workdirs[node]}/restored/dag.run/checkpoint-8"
        found = {str(p.relative_to(path)): p.read_bytes() for p in Path(path).rglob("*") if p.is_file()}
        assert found == content
    assert restore() == answer, "what is there is compared and left alone"


def test_an_interrupted_restore_goes_on_and_a_damaged_one_never_appears(
    run: Run, configs: Path, tmp_path: Path
) -> None:
    run.save(8)
    run.backup()
    target = str(tmp_path / "target")
    run.server.inject(kind="status", status=403, code="AccessDenied", key="*rng_state_1.pth", times=None)
    with pytest.raises(RestoreFailed, match=r"node1: .*AccessDenied"):
        restore(nodes=["node1"], target=target)
    assert not (Path(target) / "checkpoint-8").exists()
    run.server.faults.clear()
    bucket = store.open_bucket(run.target)
    data = bucket.get_object("ckpt/dag/run/checkpoint-8/scheduler.pt").read()
    assert restore(nodes=["node1"], target=target)["paths"] == {"node1": f"{target}/checkpoint-8"}
    bucket.put_object("ckpt/dag/run/checkpoint-8/scheduler.pt", b"S" * len(data))
    other = str(tmp_path / "other")
    with pytest.raises(RestoreFailed, match="CRC64"):
        restore(checkpoint="oss://bucket/ckpt/dag/run/checkpoint-8", recipe=None, cluster="c", target=other)
    assert not (Path(other) / "checkpoint-8").exists()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"nodes": ["node7"]}, "node7: not of cluster c; it has node1, node2"),
        ({"target": "here"}, "is not an absolute path"),
        ({"checkpoint": "checkpoint-9"}, "no checkpoint 'checkpoint-9'"),
        ({"recipe": None}, "is no oss:// location"),
        ({"recipe": None, "checkpoint": "oss://bucket/ckpt/dag/run/checkpoint-8"}, "cluster: is missing"),
    ],
)
def test_what_cannot_be_meant_is_told(run: Run, configs: Path, given: dict[str, Any], problem: str) -> None:
    run.save(8)
    run.backup()
    with pytest.raises(ValueError, match=problem):
        restore(**given)


# -- housekeeping ---------------------------------------------------------------------------------------------------


class Ti:
    """The part of a task instance that asks Airflow for states."""

    def __init__(self, **states: str) -> None:
        self.states = states

    def get_task_states(self, dag_id: str, run_ids: list[str]) -> dict[str, dict[str, str]]:
        assert dag_id == "dag"
        return {name: {"backup": self.states[name]} for name in run_ids if name in self.states}


def clean_up(policy: str, **states: str) -> Any:
    operator = CleanUpOperator(task_id="clean_up", policy=policy, grace_hours=1, jobs_days=30, cache_days=30)
    return operator.execute({"ti": Ti(**states)})  # type: ignore[typeddict-item]


def age_objects(run: Run, monkeypatch: pytest.MonkeyPatch, hours: float) -> None:
    """Nobody waits for hours here: what is found counts as older."""
    real = store.find_leftovers

    def older(target: Any) -> Any:
        return [dataclasses.replace(item, touched=item.touched - hours * 3600) for item in real(target)]

    monkeypatch.setattr(store, "find_leftovers", older)


def test_what_nobody_will_finish_goes_by_policy(run: Run, configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(8)
    run.save(16)
    run.backup()
    bucket = store.open_bucket(run.target)
    bucket.delete_object("ckpt/dag/run/checkpoint-16/manifest.json")
    node = NodePaths(run.site.workdirs["node1"])
    for name, days in (("old", 40), ("young", 1)):
        node.job(name).create()
        ended = time.time() - days * 86400
        records.write_state(node.job(name), JobState(name, Phase.EXITED, ended_at=ended))
    assert not [row for row in clean_up("delete", run="failed")["buckets"] if row["delete"]], "it is young"
    assert not Path(node.job("old").folder).exists()
    age_objects(run, monkeypatch, 5)
    assert [row["delete"] for row in clean_up("delete", run="running")["buckets"]] == [False]
    assert [row["delete"] for row in clean_up("delete")["buckets"]] == [False], "another Airflow's, perhaps"
    report = clean_up("report", run="failed")
    assert [row["delete"] for row in report["buckets"]] == [True]
    assert any(key.startswith("checkpoint-16/") for key in run.objects())
    assert clean_up("delete", run="failed")["buckets"][0]["what"].startswith(
        "oss://bucket/ckpt/dag/run/checkpoint-16 ("
    )
    assert {key.split("/")[0] for key in run.objects()} == {"checkpoint-8"}
    assert Path(node.job("young").folder).exists()


def test_a_bucket_that_cannot_be_reached_hides_nothing_of_the_nodes(
    run: Run, configs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (configs / "recipes" / "r.yaml").write_text(
        "name: r\ncluster: c\nswift: {args: {model: m/m, dataset: [d/d]}}\ncheckpoints: {backup: oss://nowhere/x}\n"
    )
    node = NodePaths(run.site.workdirs["node2"])
    node.job("old").create()
    records.write_state(node.job("old"), JobState("old", Phase.EXITED, ended_at=1e9))
    assert [row["what"] for row in clean_up("report")["nodes"]] == [node.job("old").folder]
    assert "NoSuchBucket" in capfd.readouterr().out


# -- secrets --------------------------------------------------------------------------------------------------------


def test_the_secret_key_is_in_no_log_result_or_file(
    run: Run, configs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        run.save(8)
        results = [run.backup(), run.prune()]
        job = run.site.start(run.plan)
        results += [restore(), clean_up("delete", run="success")]
        with pytest.raises(RestoreFailed):
            restore(target="/proc/nowhere")
    written = capfd.readouterr()
    assert "files proven in oss://bucket/ckpt/dag/run/checkpoint-8" in written.out, "these are the logs"
    for text in (caplog.text, json.dumps(results), written.out, written.err):
        assert SECRET not in text
    files = [path for node in NODES for path in run.site.folder(node).rglob("*") if path.is_file()]
    assert any(path.match(f"jobs/{job}/spec.json") for path in files)
    assert any(path.match("restored/*/checkpoint-8/model.safetensors") for path in files)
    assert [path for path in [*files, *configs.rglob("*.yaml")] if SECRET.encode() in path.read_bytes()] == []
    for name in NODES:
        for pid in run.site.processes(name):
            for kind in ("cmdline", "environ"):
                assert SECRET.encode() not in Path(f"/proc/{pid}/{kind}").read_bytes()
