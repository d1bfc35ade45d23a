"""Faults that need no Airflow: SSH sessions that die, a cancel that a cut node hears later."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from swift_provider.hooks import endpoint
from swift_provider.hooks.cancel import cancel_until_heard
from swift_provider.hooks.nodes import NodesHook
from swift_provider.triggers.follower import GangFollower
from tests.cluster import stand_in
from tests.cluster.sites import Site, kill, until
from tests.cluster.test_gang import LONG, NODES, Follow, expected_lines
from trainer.process import descendants


def sessions_of(site: Site, name: str) -> set[int]:
    """Every process of the node's sshd but the one that listens."""
    [node] = [node for node in site.nodes if node.name == name]
    assert node.process is not None
    return {identity.pid for identity in descendants([node.process.pid])}


def test_ssh_sessions_that_are_killed_cost_neither_the_training_nor_a_byte_of_its_log(site: Site) -> None:
    plan = site.plan(max_steps=120, **stand_in.arguments(step_s=0.1))
    job = site.start(plan)
    children = {name: site.state(name, job).child for name in NODES}
    kills = []

    def step(follower: GangFollower) -> bool:
        progress = follower.progress
        if progress and progress.step >= 20 * (len(kills) + 1) and len(kills) < 4:
            kills.append({name: sessions_of(site, name) for name in NODES})
            for pid in set().union(*kills[-1].values()):
                kill(pid, signal.SIGKILL)
        assert not follower.lost_nodes
        return follower.over

    follow = Follow(site, plan, job)
    follow.until(step, timeout=120, drain=True)
    assert len(kills) == 4
    assert all(pids for found in kills for pids in found.values()), "there was no session to kill"
    for name in NODES:
        state = site.state(name, job)
        assert (state.exit_code, state.stop_reason, state.child) == (0, None, children[name])
        assert follow.lines[name] == expected_lines(site.log(name, job))


def test_a_cancel_ends_what_a_cut_node_runs_as_soon_as_it_is_back(hosts: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hosts.cluster is not None
    monkeypatch.setattr(endpoint, "KEEPALIVE_S", 1)
    for name in NODES:
        hosts.publish(name, extra={"conn_timeout": 1})
    plan = hosts.plan(**LONG)
    handle = hosts.handle(plan)
    hosts.start(plan)
    cluster = hosts.cluster

    async def cancel() -> None:
        async with NodesHook.for_plan(plan).group() as group:
            owner = hosts.gang(plan, group).owner
            cluster.cut("node2")
            began = time.monotonic()
            task = asyncio.create_task(cancel_until_heard(group, owner, "marked failed", keep_trying=120.0))
            while hosts.processes("node1"):
                await asyncio.sleep(0.1)
                assert time.monotonic() - began < 45, "the node within reach must not wait for the other"
            assert hosts.processes("node2"), "the cable was not out"
            await asyncio.sleep(3)
            cluster.heal("node2")
            assert await task == set()

    hosts.run(cancel)
    until(lambda: not hosts.processes("node2"), 45)
    assert hosts.state("node2", handle.job_id).stop_reason == "marked failed"
    assert Path(hosts.folder("node2")).is_dir()
