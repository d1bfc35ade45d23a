"""Preflight from the first login to the table, on real nodes with real faults."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from swift_provider.exceptions import PreflightFailed
from swift_provider.hooks.nodes import NodesHook
from swift_provider.operators import preflight
from swift_provider.operators.preflight import PreflightOperator, _gather_facts
from swift_provider.planning.checks import FAIL, Check, check_nodes
from swift_provider.planning.plan import LaunchPlan
from tests.cluster import stand_in
from tests.cluster.sites import Site, trainer_python
from trainer.protocol import Owner


def checks_of(site: Site, plan: LaunchPlan) -> list[Check]:
    facts, errors = site.run(lambda: _gather_facts(plan, NodesHook.for_plan(plan).group()))
    return check_nodes(plan, facts, {name: str(error) for name, error in errors.items()}, preflight.origin())


@pytest.fixture(autouse=True)
def _as_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "REACH_TIMEOUT_S", 4.5)
    monkeypatch.setattr(preflight, "origin", lambda: "here")


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
