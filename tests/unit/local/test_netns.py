"""Namespace hosts: what each fault looks like from the controller, and that nothing is ever left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest

from local import netns
from local.netns import HostCluster, why_not

pytestmark = pytest.mark.skipif(
    why_not() is not None and not (os.geteuid() == 0 and os.environ.get("CI") == "true"), reason=str(why_not())
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    with HostCluster(tmp_path_factory.mktemp("hosts")) as cluster:
        cluster.up(2)
        yield cluster


def run_on(cluster: HostCluster, name: str, command: str, timeout: float = 5.0) -> str:
    host = cluster[name]

    async def work() -> str:
        options = {"username": "root", "client_keys": [str(host.client_key)], "connect_timeout": timeout}
        known = asyncssh.import_known_hosts(f"{host.address} {host.host_key}\n")
        async with asyncssh.connect(host.address, 22, known_hosts=known, **options) as connection:
            return str((await connection.run(command, check=True)).stdout).strip()

    return cluster.call(lambda: asyncio.run(work()))


def test_each_host_is_a_machine_of_its_own(cluster: HostCluster) -> None:
    for name in ("node1", "node2"):
        assert run_on(cluster, name, "hostname") == name
        assert run_on(cluster, name, "ls -A /dev/shm") == ""
        run_on(cluster, name, f"echo {name} > /srv/mine; sleep 300 >/dev/null 2>&1 & echo")
        assert (cluster[name].disk / "mine").read_text() == f"{name}\n"
        pids = run_on(cluster, name, "ps -e | wc -l")
        assert int(pids) < 15
        assert len(cluster[name].processes()) >= 2
    boots = {run_on(cluster, name, "cat /proc/sys/kernel/random/boot_id") for name in ("node1", "node2")}
    assert len(boots | {Path("/proc/sys/kernel/random/boot_id").read_text().strip()}) == 3
    assert run_on(cluster, "node1", "getent hosts node2").split() == ["10.200.0.12", "node2"]


def test_the_controller_reaches_the_hosts_and_nothing_else(cluster: HostCluster) -> None:
    done = subprocess.run(cluster.command("ip", "route"), capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "10.200.0.0/24"
    assert "default" not in done.stdout


def test_a_cut_cable_is_silence_and_a_killed_host_a_refusal(cluster: HostCluster) -> None:
    cluster.cut("node1")
    with pytest.raises(TimeoutError):
        run_on(cluster, "node1", "true", timeout=1.0)
    assert run_on(cluster, "node2", "hostname") == "node2"
    cluster.heal("node1")
    assert run_on(cluster, "node1", "hostname") == "node1"
    cluster.kill("node1")
    assert cluster["node1"].processes() == []
    with pytest.raises(ConnectionRefusedError):
        run_on(cluster, "node1", "true")
    cluster.boot("node1")


def test_a_host_that_was_off_keeps_its_disk_and_nothing_else(cluster: HostCluster) -> None:
    run_on(cluster, "node2", "echo kept > /srv/file; touch /dev/shm/lost")
    before = run_on(cluster, "node2", "cat /proc/sys/kernel/random/boot_id")
    cluster.poweroff("node2")
    with pytest.raises(TimeoutError):
        run_on(cluster, "node2", "true", timeout=1.0)
    cluster.boot("node2")
    assert run_on(cluster, "node2", "cat /srv/file; ls /dev/shm") == "kept"
    assert run_on(cluster, "node2", "cat /proc/sys/kernel/random/boot_id") != before


def namespaces(prefix: str) -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith(prefix)]


def test_two_clusters_do_not_see_each_other_and_each_removes_its_own(cluster: HostCluster, tmp_path: Path) -> None:
    with HostCluster(tmp_path) as other:
        other.up(1)
        assert other["node1"].address == cluster["node1"].address
        run_on(other, "node1", "touch /srv/other")
        assert not (cluster["node1"].disk / "other").exists()
        pids = other["node1"].processes()
    assert namespaces(other.name) == []
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert run_on(cluster, "node1", "hostname") == "node1"


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns, "_INIT", "exit 7")
    cluster = HostCluster(tmp_path)
    with pytest.raises(RuntimeError):
        cluster.up(2)
    assert namespaces(cluster.name) == []


def test_hosts_die_with_a_test_run_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from local.netns import HostCluster\n"
        "cluster = HostCluster(Path(sys.argv[1])); cluster.up(1)\n"
        "print(cluster.name, cluster['node1'].processes()[0], flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    name, pid = child.stdout.readline().split()
    child.send_signal(signal.SIGKILL)
    child.wait()
    limit = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    netns.remove_leftovers()
    assert namespaces(name) == []
