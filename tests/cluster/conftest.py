"""Nodes for the tests of this folder: two loopback sshds for all, two namespace hosts where a cable is pulled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.airflow.home import HOME  # noqa: F401 - before anything here imports airflow

# ruff: isort: split
from local.netns import HostCluster, why_not
from local.nodes import LocalNode, make_nodes
from local.processes import free_port
from tests.cluster.buckets import run  # noqa: F401 - a fixture
from tests.cluster.sites import Site, host_site, loopback_site, trainer_python

trainer_python()


@pytest.fixture(scope="session")
def loopback_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LocalNode]]:
    nodes = make_nodes(tmp_path_factory.mktemp("loopback"), port=free_port("127.0.0.11"))
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.stop()


@pytest.fixture
def site(loopback_nodes: list[LocalNode], tmp_path: Path) -> Iterator[Site]:
    """Two loopback nodes without a shared disk."""
    with loopback_site(loopback_nodes, tmp_path, free_port()) as site:
        yield site


@pytest.fixture
def shared_site(loopback_nodes: list[LocalNode], tmp_path: Path) -> Iterator[Site]:
    """Two loopback nodes whose checkpoints lie on one disk."""
    with loopback_site(loopback_nodes, tmp_path, free_port(), shared=True) as site:
        yield site


@pytest.fixture(scope="session")
def host_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    reason = why_not()
    if reason:
        if os.geteuid() == 0 and os.environ.get("CI") == "true":
            pytest.fail(f"in CI, as root, nothing is skipped: {reason}")
        pytest.skip(reason)
    with HostCluster(tmp_path_factory.mktemp("hosts")) as cluster:
        cluster.up(2)
        yield cluster


@pytest.fixture
def hosts(host_cluster: HostCluster, tmp_path: Path) -> Iterator[Site]:
    """Two namespace hosts, both up and connected when a test begins."""
    for host in host_cluster.hosts:
        host_cluster.heal(host.name)
        if host.process is None:
            host_cluster.boot(host.name)
    with host_site(host_cluster, tmp_path, 29500) as site:
        yield site
