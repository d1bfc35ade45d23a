"""A gang on real nodes: started once, ended as one, followed to its last byte, also over a cut cable."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_provider.exceptions import NodeBusy, NodeUnreachable
from swift_provider.hooks import endpoint
from swift_provider.hooks.nodes import NodesHook
from swift_provider.planning.gang import first_failure
from swift_provider.planning.plan import LaunchPlan
from swift_provider.triggers import follower as follower_module
from swift_provider.triggers.follower import TAIL_LINES, GangFollower
from swift_provider.triggers.logs import LogCursor
from tests.cluster import stand_in
from tests.cluster.sites import Site, kill, until
from trainer.protocol import JobSpec, Owner, Phase, StartReply, StartRequest

NODES = ("node1", "node2")
LONG = {"max_steps": 10**6}


def start_all(site: Site, plan: LaunchPlan) -> tuple[str, dict[str, str]]:
    """Starts (or attaches) and returns job id and each node's phase."""
    handle = site.handle(plan)
    states = site.with_group(plan, lambda group: site.gang(plan, group).start(handle, None))
    return handle.job_id, {name: state.phase for name, state in states.items()}


class Follow:
    """A follower in its own loop, polled until something holds; keeps what it saw."""

    def __init__(self, site: Site, plan: LaunchPlan, job: str, **options: Any) -> None:
        self.site, self.plan, self.job, self.options = site, plan, job, options
        self.lines: dict[str, list[str]] = {name: [] for name in NODES}
        self.offsets: dict[str, int] = {}

    def until(
        self, done: Callable[[GangFollower], Any], timeout: float = 40.0, drain: bool = False, pause: float = 0.2
    ) -> GangFollower:
        async def work() -> GangFollower:
            async with NodesHook.for_plan(self.plan).group() as group:
                follower = GangFollower(group, self.job, self.offsets, **self.options)
                limit = time.monotonic() + timeout
                while True:
                    self._keep(await follower.poll())
                    if done(follower):
                        break
                    assert time.monotonic() < limit, (follower.states, follower.views)
                    await asyncio.sleep(pause)
                if drain:
                    self._keep(await follower.drain())
                self.offsets = follower.offsets
                await follower.close()
                return follower

        return self.site.run(work)

    def _keep(self, lines: dict[str, list[str]]) -> None:
        for name, new in lines.items():
            self.lines[name] += new


def over(follower: GangFollower) -> bool:
    return follower.over


def expected_lines(log: bytes) -> list[str]:
    """The lines of a whole log, by the same rules but in one piece."""
    cursor = LogCursor()
    return cursor.feed(log) + cursor.flush()


# -- start ----------------------------------------------------------------------------------------------------


def test_a_second_start_attaches(site: Site) -> None:
    plan = site.plan(**LONG)
    job, _ = start_all(site, plan)
    before = {name: (site.supervisors(name), site.state(name, job).child) for name in NODES}
    again, phases = start_all(site, plan)
    assert again == job
    assert phases == {"node1": "running", "node2": "running"}
    assert {name: (site.supervisors(name), site.state(name, job).child) for name in NODES} == before
    assert all(len(pids) == 1 for pids, _ in before.values())


def test_eight_starts_at_once_start_one_gang(site: Site) -> None:
    plan = site.plan(**LONG)
    handle = site.handle(plan)

    async def one() -> Any:
        async with NodesHook.for_plan(plan).group() as group:
            return await site.gang(plan, group).start(handle, None)

    async def eight() -> Any:
        return await asyncio.gather(*(one() for _ in range(8)))

    site.run(eight)
    for name in NODES:
        assert len(site.supervisors(name)) == 1


def test_a_busy_node_refuses_names_its_holder_and_nothing_is_left(site: Site) -> None:
    nightly = site.plan("nightly", **LONG)
    owner = Owner(dag_id="other_dag", run_id="nightly-7", task_id="train", origin="https://airflow.example")
    alone = nightly.model_copy(update={"nodes": nightly.nodes[1:]})
    holder = site.start(alone, owner=owner)
    plan = site.plan("mine", **LONG)
    with pytest.raises(NodeBusy) as caught:
        start_all(site, plan)
    assert "node2: busy with dag other_dag, run nightly-7 of https://airflow.example since" in str(caught.value)
    assert "node1" not in str(caught.value)
    until(lambda: not site.processes("node1"))
    until(lambda: not site.supervisors("node1"))
    assert site.state("node2", holder).phase == Phase.RUNNING


def test_a_node_that_is_down_stops_what_was_started_elsewhere(hosts: Site) -> None:
    assert hosts.cluster is not None
    hosts.cluster.kill("node2")
    plan = hosts.plan(**LONG)
    with pytest.raises(NodeUnreachable) as caught:
        start_all(hosts, plan)
    assert "node2 (10.200.0.12:22)" in str(caught.value)
    until(lambda: not hosts.processes("node1"))
    assert hosts.state("node1", hosts.handle(plan).job_id).stop_reason == "the gang could not start"


# -- the end ----------------------------------------------------------------------------------------------------


def test_a_gang_that_ends_well_has_a_result_on_both_nodes(site: Site) -> None:
    plan = site.plan(max_steps=6, save_steps=3)
    follow = Follow(site, plan, site.start(plan))
    follower = follow.until(over, drain=True)
    assert first_failure(follower.states) is None
    assert {state.exit_code for state in follower.states.values()} == {0}
    assert (follower.progress.step, follower.progress.max_steps) == (6, 6)
    for name in NODES:
        assert follow.lines[name] == expected_lines(site.log(name, follow.job))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_failing_rank_ends_the_whole_gang_and_is_named_first(site: Site, rank: int) -> None:
    plan = site.plan(**LONG, **stand_in.arguments(fail_rank=rank, fail_step=10))
    job = site.start(plan)
    failed, other = NODES[rank], NODES[1 - rank]
    follow = Follow(site, plan, job)
    follower = follow.until(over, drain=True)
    first = first_failure(follower.states)
    assert first is not None
    assert first[0] == failed
    states = follower.states
    assert states[failed].exit_code == 1
    assert states[other].stop_reason == f"{failed} failed"
    assert states[other].ended_at - states[failed].ended_at < 5.0
    assert any(f"rank {rank} has had enough" in line for line in follower.views[failed].tail)
    assert not site.processes("node1") | site.processes("node2")


def test_a_stop_leaves_no_process_not_even_escaped_or_deaf_ones(hosts: Site) -> None:
    plan = hosts.plan(**LONG, slots=2, grace=1.0, **stand_in.arguments(escape=True, ignore_term=True))
    job = hosts.start(plan)
    for name in NODES:  # launcher, two ranks, two children in sessions of their own
        until(lambda name=name: len(hosts.processes(name)) >= 5)
    hosts.with_group(plan, lambda group: hosts.gang(plan, group).stop(job, "enough"))
    hosts.with_group(plan, lambda group: hosts.gang(plan, group).wait_until_over(job))
    for name in NODES:
        assert not hosts.processes(name)
        state = hosts.state(name, job)
        assert (state.phase, state.stop_reason) == (Phase.KILLED, "enough")
        assert state.killed >= 3
        assert not state.survivors


# -- the log ----------------------------------------------------------------------------------------------------


def junk(size: int, seed: int) -> bytes:
    """Lines as they come in practice: Chinese text, progress bars, colours, bytes of no encoding, very long ones."""
    rng, parts, length = random.Random(seed), [], 0  # noqa: S311 - the same bytes every time
    while length < size:
        kind = rng.randrange(6)
        if kind == 0:
            part = ("训练损失下降，学习率 1e-4 " * rng.randrange(1, 20)).encode() + b"\n"
        elif kind == 1:
            part = b"".join(f"\r{n}%|{'█' * n}".encode() for n in range(0, 100, 7)) + b"\n"
        elif kind == 2:
            part = rng.randbytes(rng.randrange(1, 400)) + b"\n"
        elif kind == 3:
            part = b"\r\n\n\r\r\n" + b"\x1b[31mred\x1b[0m\n"
        elif kind == 4:
            part = b"x" * rng.randrange(1, 200_000) + b"\n"
        else:
            part = "半".encode()[: rng.randrange(1, 3)] + b" half a character\n"
        parts.append(part)
        length += len(part)
    return b"".join(parts) + "没有换行的最后一行".encode()


def test_a_follower_that_is_restarted_again_and_again_loses_and_repeats_no_byte(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "LOG_CHUNK", 300_000)
    for index, name in enumerate(NODES):
        (tmp_path / f"dump-{name}").write_bytes(junk(5_000_000, seed=index))
    plan = site.plan(max_steps=1, **stand_in.arguments(dump=str(tmp_path / "dump-{node}"), dump_pause_s=0.02))
    job = site.start(plan)
    follow = Follow(site, plan, job)
    polls = iter(range(10**6))
    while not follow.until(lambda follower: follower.over or next(polls) % 4 == 3, pause=0.05).over:
        pass
    follow.until(over, drain=True)
    for name in NODES:
        log = site.log(name, job)
        assert (tmp_path / f"dump-{name}").read_bytes() in log
        assert follow.lines[name] == expected_lines(log)
        assert follow.offsets[name] == len(log)


def test_a_follower_that_takes_over_has_the_evidence_that_was_handed_out(site: Site) -> None:
    plan = site.plan(max_steps=30, **stand_in.arguments(step_s=0.05))
    job = site.start(plan)
    first = Follow(site, plan, job)
    first.until(over, drain=True)
    other = Follow(site, plan, job, solo_world=["node2"])
    other.offsets = first.offsets
    follower = other.until(over, drain=True)
    assert other.lines == {name: [] for name in NODES}, "no line is handed out twice"
    for name in NODES:
        assert list(follower.views[name].tail) == first.lines[name][-TAIL_LINES:]
    assert follower.solo_world == ["node2"]


def test_offsets_never_run_ahead_of_the_lines_that_were_handed_out(site: Site, tmp_path: Path) -> None:
    """A look that outlasts the poll may have read lines that nobody has seen; a successor must read them again."""
    for index, name in enumerate(NODES):
        (tmp_path / f"dump-{name}").write_bytes(junk(2_000_000, seed=index))
    plan = site.plan(max_steps=1, **stand_in.arguments(dump=str(tmp_path / "dump-{node}"), dump_pause_s=0.05))
    job = site.start(plan)
    lines: dict[str, list[str]] = {name: [] for name in NODES}

    async def work() -> None:
        async with NodesHook.for_plan(plan).group() as group:
            follower = GangFollower(group, job)
            while not follower.over:
                for name, new in (await follower.poll(patience=0.0)).items():
                    lines[name] += new
                await asyncio.sleep(0.1)
                offsets = follower.offsets
                for name in NODES:
                    handed_out = expected_lines(site.log(name, job)[: offsets[name]])
                    assert len(lines[name]) == len(handed_out)
            await follower.close()

    site.run(work)


# -- the cable ----------------------------------------------------------------------------------------------------


def test_a_cable_that_is_out_for_twenty_seconds_harms_nothing(hosts: Site) -> None:
    assert hosts.cluster is not None
    plan = hosts.plan(max_steps=230, **stand_in.arguments(step_s=0.1))
    job = hosts.start(plan)
    follow = Follow(hosts, plan, job)
    children = {name: hosts.state(name, job).child for name in NODES}
    follow.until(lambda follower: follower.progress and follower.progress.step > 5)
    cluster = hosts.cluster
    began = time.monotonic()
    cluster.cut("node2")
    healed = False
    cut_lines: dict[str, list[int]] = {name: [] for name in NODES}

    def step(follower: GangFollower) -> bool:
        nonlocal healed
        if not healed and time.monotonic() - began > 20:
            cluster.heal("node2")
            healed = True
        if 2 < time.monotonic() - began < 19:
            for name in NODES:
                cut_lines[name].append(len(follow.lines[name]))
        assert not follower.lost_nodes
        return follower.over

    follower = follow.until(step, timeout=120, drain=True)
    assert len(set(cut_lines["node2"])) == 1, "the cable was not out"
    assert cut_lines["node1"][-1] - cut_lines["node1"][0] > 80, "a node out of reach delays the other"
    assert follower.views["node2"].problem == ""
    for name in NODES:
        state = hosts.state(name, job)
        assert (state.exit_code, state.stop_reason, state.child) == (0, None, children[name])
        assert follow.lines[name] == expected_lines(hosts.log(name, job))
        assert sum(line.startswith("step ") for line in follow.lines[name]) == 230


def test_a_cable_that_is_out_for_longer_than_the_grace_makes_a_lost_node(
    hosts: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hosts.cluster is not None
    monkeypatch.setattr(endpoint, "KEEPALIVE_S", 1)
    hosts.publish("node1", extra={"conn_timeout": 1})
    plan = hosts.plan(**LONG)
    job = hosts.start(plan)
    follow = Follow(hosts, plan, job, unreachable_grace=3.0)
    hosts.cluster.cut("node1")  # the node that steps and writes the progress
    follower = follow.until(lambda follower: follower.lost_nodes, timeout=90)
    assert follower.lost_nodes == ["node1"]
    assert not follower.views["node2"].ended
    assert hosts.processes("node1"), "unreachable is not dead"


def test_a_run_that_steps_on_is_not_lost_when_one_node_is_out_of_reach(hosts: Site) -> None:
    assert hosts.cluster is not None
    plan = hosts.plan(**LONG, **stand_in.arguments(step_s=0.2))
    job = hosts.start(plan)
    follow = Follow(hosts, plan, job, unreachable_grace=4.0)
    hosts.cluster.kill("node2")  # refuses at once, so that node1 is seen every poll
    began = time.monotonic()

    def long_enough(follower: GangFollower) -> bool:
        assert follower.lost_nodes == []
        return time.monotonic() - began > 6

    follower = follow.until(long_enough)
    assert follower.views["node2"].problem


# -- a supervisor that dies ---------------------------------------------------------------------------------------


def test_a_killed_supervisor_is_found_by_its_heartbeat_and_its_orphans_end_at_the_next_start(
    hosts: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "STALE_HEARTBEAT_S", 3.0)
    plan = hosts.plan(**LONG)
    job = hosts.start(plan)
    follow = Follow(hosts, plan, job)
    follow.until(lambda follower: follower.progress)
    [supervisor] = hosts.supervisors("node1")
    kill(supervisor, signal.SIGKILL)
    orphans = hosts.processes("node1")
    assert orphans
    follower = follow.until(over)
    first = first_failure(follower.states)
    assert first is not None
    assert (first[0], first[1].phase) == ("node1", Phase.LOST)
    assert "died without a word" in (first[1].error or "")
    assert follower.states["node2"].stop_reason == "node1 failed"
    assert hosts.processes("node1") >= orphans, "a lost job's processes are ended by the next start"
    hosts.start(hosts.plan(max_steps=1), generation=2)
    assert not orphans & hosts.processes("node1")


def test_a_lost_verdict_stays(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dead supervisor's last state still says running; later looks at it must not bring the job back to life."""
    monkeypatch.setattr(follower_module, "STALE_HEARTBEAT_S", 2.0)
    plan = site.plan(**LONG)
    job = site.start(plan)
    follow = Follow(site, plan, job)
    [supervisor] = site.supervisors("node1")
    os.kill(supervisor, signal.SIGKILL)
    seen: list[str] = []

    def look(follower: GangFollower) -> bool:
        seen.append(follower.states["node1"].phase)
        return Phase.LOST in seen and len(seen) - seen.index(Phase.LOST) > 4

    follow.until(look)
    assert set(seen[seen.index(Phase.LOST) :]) == {Phase.LOST}


def test_a_machine_that_was_off_tells_so_when_it_is_back(hosts: Site) -> None:
    assert hosts.cluster is not None
    plan = hosts.plan(**LONG)
    job = hosts.start(plan)
    until(lambda: (hosts.folder("node2") / "jobs" / job / "log").stat().st_size)
    hosts.cluster.poweroff("node2")
    hosts.cluster.boot("node2")
    states = hosts.with_group(plan, lambda group: hosts.gang(plan, group).states(job))
    assert states["node1"].phase == Phase.RUNNING
    assert states["node2"].phase == Phase.LOST
    assert "the machine was restarted" in (states["node2"].error or "")


def test_a_retry_leaves_a_part_that_has_ended_well_and_one_that_still_runs_alone(site: Site) -> None:
    """The last ranks may save for minutes after the first node is done; a retry in that time must not end them."""
    plan = site.plan()
    handle = site.handle(plan)
    owner = Owner(dag_id=plan.dag_id, run_id=plan.run_id, task_id="train", origin="here")
    commands = {"node1": ["true"], "node2": ["sleep", "1000"]}
    requests = {
        name: StartRequest(site.workdirs[name], JobSpec(handle.job_id, argv, owner=owner))
        for name, argv in commands.items()
    }
    site.with_group(plan, lambda group: group.call_all("start", requests, StartReply))
    until(lambda: site.state("node1", handle.job_id).phase == Phase.EXITED)
    assert start_all(site, plan) == (handle.job_id, {"node1": Phase.EXITED, "node2": Phase.RUNNING})
    assert site.state("node2", handle.job_id).phase == Phase.RUNNING
    assert len(site.processes("node2")) == 1
