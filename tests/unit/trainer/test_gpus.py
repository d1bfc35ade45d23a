"""Leases of GPUs: jobs that share a node, and never a GPU."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer import jobs, probe, process, protocol, records, torch_locks
from trainer.protocol import JobsRequest, Phase, ProbeRequest, StartReply, StartRequest, StartResult

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
TREE = "import subprocess, time; subprocess.Popen(['env', '-i', 'setsid', 'sleep', '600']); " + SLEEP


def kill_supervisor(node, job_id):
    supervisor = node.state(job_id).supervisor
    os.kill(supervisor.pid, signal.SIGKILL)
    node.until(lambda: not process.is_alive(supervisor))


def test_jobs_with_other_gpus_run_side_by_side(node):
    assert node.start(SLEEP, "a", gpus=[0, 1]).result == StartResult.STARTED
    assert node.start(SLEEP, "b", gpus=[3, 2]).result == StartResult.STARTED
    assert {node.state(name).phase for name in "ab"} == {Phase.RUNNING}
    busy = node.start(SLEEP, "c", gpus=[4, 2])
    assert (busy.result, busy.holder.job_id, busy.holder.gpus) == (StartResult.BUSY, "b", [3, 2])
    assert node.start(SLEEP, "d").holder.job_id == "a"
    node.stop("b", grace_s=0)
    assert node.start(SLEEP, "e", gpus=[4, 2]).result == StartResult.STARTED


def test_the_whole_node_shares_with_nobody(node):
    node.start(SLEEP, "whole")
    busy = node.start(SLEEP, "part", gpus=[7])
    assert (busy.result, busy.holder.job_id, busy.holder.gpus) == (StartResult.BUSY, "whole", None)
    node.stop("whole", grace_s=0)
    node.start(SLEEP, "part", gpus=[7])
    assert node.start(SLEEP, "other").holder.job_id == "part"


def test_a_busy_start_keeps_nothing(node):
    node.start(SLEEP, "a", gpus=[1])
    assert node.start(SLEEP, "b", gpus=[0, 1]).result == StartResult.BUSY
    assert node.start(SLEEP, "c", gpus=[0]).result == StartResult.STARTED


def test_all_holders_are_reported(node):
    node.start(SLEEP, "a", gpus=[1])
    node.start(SLEEP, "b", gpus=[0, 5], hold_s=30)
    for reply in (jobs.jobs(JobsRequest(node.workdir)), probe.probe(ProbeRequest(node.workdir))):
        assert [(holder.job_id, holder.gpus) for holder in reply.holders] == [("a", [1]), ("b", [0, 5])]
        assert reply.holder == reply.holders[0]
    kill_supervisor(node, "a")
    assert [holder.job_id for holder in jobs.jobs(JobsRequest(node.workdir)).holders] == ["b"]
    node.stop("b")
    assert jobs.jobs(JobsRequest(node.workdir)).holders == []


def test_an_older_reader_still_sees_one_holder():
    reply = protocol.loads(protocol.JobsReply, '{"jobs": [], "holder": {"job_id": "a"}}')
    assert (reply.holder.gpus, reply.holders) == (None, [])


def test_the_training_sees_its_gpus_only(node):
    code = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('CUDA')}))"
    node.start(code, gpus=[3, 1])
    node.wait()
    assert json.loads(node.log()) == {"CUDA_VISIBLE_DEVICES": "3,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert node.start(code, "same", gpus=[3], env={"CUDA_VISIBLE_DEVICES": "3"}).result == StartResult.STARTED
    node.wait("same")
    refused = node.start(code, "other", gpus=[3], env={"CUDA_VISIBLE_DEVICES": "0,3"})
    assert (refused.result, "CUDA_VISIBLE_DEVICES=0,3" in refused.error) == (StartResult.FAILED, True)
    assert node.start(code, "whole", env={"CUDA_VISIBLE_DEVICES": "0"}).result == StartResult.STARTED


def test_only_the_dead_are_buried_on_a_shared_node(node):
    for number, name in enumerate(("dead", "living", "prepared")):
        node.start(TREE, name, gpus=[number], hold_s=30 if name == "prepared" else 0)
    node.until(lambda: all(len(records.read_processes(node.paths.job(name))) == 2 for name in ("dead", "living")))
    living = records.read_processes(node.paths.job("living"))
    dead = records.read_processes(node.paths.job("dead"))
    kill_supervisor(node, "dead")
    reply = node.start(SLEEP, "next", gpus=[3])
    assert (reply.result, reply.reaped) == (StartResult.STARTED, 2)
    assert not any(process.is_alive(identity) for identity in dead)
    assert all(process.is_alive(identity) for identity in living)
    phases = {state.job_id: state.phase for state in jobs.jobs(JobsRequest(node.workdir)).jobs}
    assert phases == {"dead": "lost", "living": "running", "prepared": "preparing", "next": "running"}
    assert node.state("dead").ended_at


def test_the_gpu_of_a_lost_job_is_free_only_without_its_training(node):
    node.start(SLEEP, "lost", gpus=[0])
    node.start(SLEEP, "beside", gpus=[1])
    orphans = process.marked(node.workdir, "lost")
    kill_supervisor(node, "lost")
    assert node.start(SLEEP, "next", gpus=[0]).reaped == 1
    assert not any(process.is_alive(identity) for identity in orphans)
    assert len(node.alive()) == 2


def test_a_living_job_whose_state_is_damaged_is_not_buried(node):
    node.start(SLEEP, "odd", gpus=[0])
    node.until(lambda: node.log("odd"))
    supervisor, job = node.state("odd").supervisor, node.paths.job("odd")
    os.kill(supervisor.pid, signal.SIGSTOP)  # it would write its state again
    Path(job.state).write_text("")
    assert node.start(SLEEP, "next", gpus=[1]).result == StartResult.STARTED
    os.kill(supervisor.pid, signal.SIGCONT)
    node.until(lambda: node.state("odd").phase == Phase.RUNNING)
    assert len(node.alive()) == 2


def test_of_many_that_race_for_gpus_no_two_share_one(node):
    wishes = [None, *([n % 4, (n + 1) % 4] for n in range(8))]
    requests = [StartRequest(node.workdir, node.spec(SLEEP, f"job-{n}", gpus=gpus)) for n, gpus in enumerate(wishes)]
    with ThreadPoolExecutor(len(requests)) as pool:
        done = list(pool.map(lambda request: node.verb("start", request), requests))
    replies = [protocol.loads(StartReply, reply.stdout) for reply in done]
    started = [wishes[n] for n, reply in enumerate(replies) if reply.result == StartResult.STARTED]
    assert {reply.result for reply in replies} == {StartResult.STARTED, StartResult.BUSY}
    if None in started:
        assert len(started) == 1
    else:
        assert max(Counter(gpu for gpus in started for gpu in gpus).values()) == 1
    assert len(node.alive()) == len(started)


@pytest.mark.parametrize("gpus", [[-1], [0, 0], []])
def test_nonsense_is_refused(node, gpus):
    assert "refused" in node.start(SLEEP, gpus=gpus).error


# -- build locks of jobs that share a node ----------------------------------------------------------------------------


def test_a_lock_that_is_closed_and_about_to_be_removed_is_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "op" / "lock"
    path.parent.mkdir()
    path.touch()

    def builder_ends_and_another_begins(_seconds):
        path.rename(tmp_path / "away")
        path.touch()

    monkeypatch.setattr(torch_locks.time, "sleep", builder_ends_and_another_begins)
    assert torch_locks.remove_stale_locks(str(tmp_path)) == []
    assert path.exists()


def test_a_build_beside_keeps_its_lock(node, tmp_path):
    lock = tmp_path / "ext" / "op" / "lock"
    lock.parent.mkdir(parents=True)
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ext")}
    node.start(f"import os, time; os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL); time.sleep(600)", "builds", gpus=[0])
    node.until(lock.exists)
    node.start(SLEEP, "beside", gpus=[1], env=env)
    assert lock.exists()
    node.stop("builds", grace_s=0)
    node.start(SLEEP, "next", gpus=[0], env=env)
    assert not lock.exists()
