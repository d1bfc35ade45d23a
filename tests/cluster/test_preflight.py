"""Preflight from the first login to the table, on real nodes with real faults."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from swift_provider import preflight
from swift_provider.cli.app import app
from swift_provider.config import ConfigError
from swift_provider.exceptions import PreflightFailed
from swift_provider.hooks.nodes import NodesHook
from swift_provider.operators import preflight as operator_module
from swift_provider.operators.preflight import PreflightOperator
from swift_provider.planning.checks import FAIL, Check
from swift_provider.planning.plan import LaunchPlan
from tests.cluster import stand_in
from tests.cluster.sites import Site, trainer_python
from trainer.protocol import Owner


def checks_of(site: Site, plan: LaunchPlan) -> list[Check]:
    return site.call(preflight.look_at_nodes, plan, NodesHook.for_plan(plan).group, "here").checks


@pytest.fixture(autouse=True)
def _as_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "REACH_TIMEOUT_S", 4.5)
    monkeypatch.setattr(operator_module, "origin", lambda: "here")


def faults(site: Site, plan: LaunchPlan) -> dict[tuple[str, str], Check]:
    return {(check.node, check.name): check for check in checks_of(site, plan) if check.level == FAIL}


def test_a_good_cluster_is_all_well(hosts: Site) -> None:
    checks = checks_of(hosts, hosts.plan())
    assert {check.level for check in checks} == {"ok"}, checks
    found = {(check.node, check.name): check.found for check in checks}
    assert found["node1", "ssh"].startswith("node1")
    assert found["node2", "ssh"].startswith("node2")
    assert found["node2", "rendezvous"] == "10.200.0.11:29500"


def test_the_operator_returns_the_versions(site: Site) -> None:
    operator = PreflightOperator(task_id="preflight", plan=site.plan().model_dump(mode="json"))
    facts = operator.execute({})
    assert facts["warnings"] == []
    assert facts["packages"]["node1"] == facts["packages"]["node2"]
    assert facts["packages"]["node1"]["ms-swift"]


def test_a_taken_master_port_is_the_first_nodes_fault(site: Site) -> None:
    plan = site.plan()
    with socket.create_server(("127.0.0.11", plan.master_port)):
        found = faults(site, plan)
    check = found["node1", "rendezvous"]
    assert f"cannot listen on port {plan.master_port}" in check.found
    assert "free the port" in check.fix
    assert set(found) <= {("node1", "rendezvous"), ("node2", "rendezvous")}


def test_a_blocked_master_port_is_the_fault_of_who_cannot_reach_it(hosts: Site) -> None:
    plan = hosts.plan()
    wrong = plan.model_copy(
        update={"nodes": [plan.nodes[0].model_copy(update={"address": "10.200.0.99"}), plan.nodes[1]]}
    )
    found = faults(hosts, wrong)
    assert "10.200.0.99:29500" in found["node2", "rendezvous"].found


def environment_with(folder: Path, **versions: str) -> Path:
    """A Python environment like the trainer's but with other versions of some distributions."""
    python = trainer_python()
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    own = next((folder / "lib").glob("python*")) / "site-packages"
    base = next((python.parent.parent / "lib").glob("python*")) / "site-packages"
    (own / "base.pth").write_text(f"{base}\n")
    for name, version in versions.items():
        info = own / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder / "bin" / "python"


def test_different_versions_are_one_line_that_names_both(hosts: Site, tmp_path: Path) -> None:
    other = environment_with(tmp_path / "env", torch="9.9.9")
    for name, python in (("node1", trainer_python()), ("node2", other)):
        link = hosts.cluster[name].disk / f"python-{hosts.tag}"
        link.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
        link.chmod(0o755)
    found = faults(hosts, hosts.plan(python=f"/srv/python-{hosts.tag}"))
    assert set(found) == {("all", "torch")}
    assert found["all", "torch"].found.startswith("differs: node1 2.")
    assert "node2 9.9.9" in found["all", "torch"].found


def test_a_missing_package_is_named_with_the_command_that_installs_it(site: Site) -> None:
    found = faults(site, site.plan(python="/usr/bin/python3"))
    check = found["node2", "ms-swift"]
    assert check.found == "not installed"
    assert "python3" in check.fix
    assert "-m pip install ms-swift" in check.fix


def test_a_work_folder_that_cannot_be_written_is_told_with_its_path(hosts: Site) -> None:
    hosts.workdirs["node2"] = "/proc/no-such-place"
    found = faults(hosts, hosts.plan())
    assert {node for node, _ in found} == {"node2"}
    text = " ".join(f"{check.found} {check.fix}" for check in found.values())
    assert "/proc/no-such-place" in text


def test_a_busy_node_names_who_holds_it(site: Site) -> None:
    mine, other = site.plan("mine"), site.plan("other", max_steps=10**6)
    site.start(
        other, owner=Owner(dag_id="other_dag", run_id="nightly-7", task_id="train", origin="https://airflow.example")
    )
    found = faults(site, mine)
    assert set(found) == {("node1", "lease"), ("node2", "lease")}
    assert found["node1", "lease"].found == "held by other_dag nightly-7 at https://airflow.example"


def test_a_run_that_finds_itself_is_well(site: Site) -> None:
    plan = site.plan(max_steps=10**6)
    site.start(plan)
    with socket.create_server(("127.0.0.11", plan.master_port)):  # as its own rank 0 would
        assert not faults(site, plan)


def test_a_node_that_is_down_does_not_hide_another_nodes_fault(hosts: Site) -> None:
    assert hosts.cluster is not None
    hosts.cluster.kill("node2")
    plan = hosts.plan(min_free_gib=10**9)
    found = faults(hosts, plan)
    assert set(found) == {("node1", "disk"), ("node2", "ssh")}
    assert "10.200.0.12:22" in found["node2", "ssh"].fix


def test_the_operator_fails_with_the_whole_table(site: Site) -> None:
    plan = site.plan(python="/usr/bin/python3", min_free_gib=10**9)
    operator = PreflightOperator(task_id="preflight", plan=plan.model_dump(mode="json"))
    with pytest.raises(PreflightFailed) as caught:
        operator.execute({})
    lines = str(caught.value).splitlines()
    rows: list[Any] = [line for line in lines if line.startswith("FAIL")]
    assert f"{len(rows)} faults" in lines[0]
    assert {row.split()[1] for row in rows} == {"node1", "node2"}


def configs_of(site: Site, folder: Path, **cluster: Any) -> Path:
    """Recipe and cluster files that stand for the site's nodes."""
    nodes = [
        {"name": node.name, "ssh_conn_id": site.conn_id(node.name), "workdir": site.workdirs[node.name]}
        for node in site.nodes
    ]
    files = {
        "clusters/here.yaml": {
            "name": "here",
            "device": "cpu",
            "nodes": nodes,
            "python": str(trainer_python()),
            "master_port": site.port,
            "min_free_gib": 0,
            **cluster,
        },
        "recipes/tiny.yaml": {
            "name": "tiny",
            "cluster": "here",
            "swift": {"args": {"model": "org/model", "dataset": "org/data", "max_steps": 5}},
        },
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content))
    return folder


def command_line(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["preflight", "tiny", "--config", str(folder), *words])


def test_the_command_line_shows_the_same_table(site: Site, tmp_path: Path) -> None:
    done = command_line(configs_of(site, tmp_path / "configs"))
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].split() == ["node", "check", "found", "fix"]
    assert {line.split()[0] for line in lines[1:]} == {"ok"}
    assert {line.split()[1] for line in lines[1:]} == {"node1", "node2"}
    assert any("rendezvous" in line and f"127.0.0.11:{site.port}" in line for line in lines)


def test_the_command_line_ends_with_1_and_names_every_fault(site: Site, tmp_path: Path) -> None:
    folder = configs_of(site, tmp_path / "configs", min_free_gib=10**9, python="/usr/bin/python3")
    done = command_line(folder, "-p", "nodes=node2")
    assert done.exit_code == 1
    faults = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.stderr == f"{len(faults)} faults on the nodes\n"
    assert {line.split()[1] for line in faults} == {"node2"}, "the parameter chose one node"
    assert any("disk" in line for line in faults)
    assert any("-m pip install ms-swift" in line for line in faults)


def test_without_a_connection_the_command_line_takes_the_address_and_its_callers_keys(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own known_hosts knows neither node, and nothing is sent to a machine that nobody vouches for."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = configs_of(site, tmp_path / "configs")
    path = folder / "clusters" / "here.yaml"
    cluster = yaml.safe_load(path.read_text())
    for node in cluster["nodes"]:
        node |= {"address": "127.0.0.11", "ssh_conn_id": f"nobody_{node['name']}"}
    os.environ["AIRFLOW_CONN_NOBODY_NODE1"] = json.dumps({"conn_type": "ssh", "host": "127.0.0.11", "port": 1})
    try:
        path.write_text(yaml.safe_dump(cluster))
        done = command_line(folder)
        assert done.exit_code == 1
        assert [line.split()[1:3] for line in done.stdout.splitlines()[1:]] == [["node1", "ssh"], ["node2", "ssh"]]
        assert "127.0.0.11:1" in done.stdout, "the connection wins over the address"
        assert "127.0.0.11:22" in done.stdout
        del cluster["nodes"][1]["address"]
        path.write_text(yaml.safe_dump(cluster))
        with pytest.raises(ConfigError, match="no Airflow connection 'nobody_node2', and the node has no address"):
            CliRunner().invoke(app, ["preflight", "tiny", "--config", str(folder)], catch_exceptions=False)
    finally:
        del os.environ["AIRFLOW_CONN_NOBODY_NODE1"]


def test_the_stand_in_has_ms_swifts_command_line(tmp_path: Path) -> None:
    """What the tests of this folder train with is found where ms-swift would be."""
    packages = stand_in.install(tmp_path)
    code = "import swift.cli.main as main; print(main.__file__)"
    done = subprocess.run(
        [str(trainer_python()), "-c", code],
        env={"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(tmp_path / "swift" / "cli" / "main.py")
