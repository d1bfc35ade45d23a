"""Attach-or-start, lost jobs and stop, as callers meet them."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer import jobs, process, protocol, records
from trainer.paths import PathError
from trainer.protocol import JobsRequest, Owner, Phase, StartReply, StartRequest, StartResult

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


def kill_supervisor(node, job_id="job"):
    supervisor = node.state(job_id).supervisor
    os.kill(supervisor.pid, signal.SIGKILL)
    node.until(lambda: not process.is_alive(supervisor))


def test_the_same_job_is_attached_to_alive_and_ended(node):
    assert node.start(SLEEP).result == StartResult.STARTED
    again = node.start(SLEEP)
    assert (again.result, again.state.phase) == (StartResult.ATTACHED, Phase.RUNNING)
    node.stop(grace_s=0)
    after = node.start(SLEEP)
    assert (after.result, after.state.phase) == (StartResult.ATTACHED, Phase.KILLED)
    assert not node.alive()


def test_another_job_is_told_who_holds_the_node(node):
    owner = Owner("nightly", "run-1", "train", origin="airflow-a")
    node.start(SLEEP, owner=owner)
    reply = node.start(SLEEP, "other")
    assert reply.result == StartResult.BUSY
    assert (reply.holder.job_id, reply.holder.owner) == ("job", owner)
    assert process.is_alive(reply.holder.supervisor)
    assert node.state("other").phase == Phase.ABSENT


def test_the_node_is_free_when_the_state_says_that_the_job_ended(node):
    for number in range(3):
        assert node.start("pass", f"job-{number}").result == StartResult.STARTED
        node.wait(f"job-{number}")
    node.until(lambda: not process.is_alive(node.state("job-2").supervisor))
    reply = jobs.jobs(JobsRequest(node.workdir))
    assert [state.job_id for state in reply.jobs] == ["job-0", "job-1", "job-2"]
    assert reply.holder is None


def test_two_nodes_on_one_machine_do_not_see_each_other(make_node):
    one, two = make_node("one"), make_node("two")
    assert one.start(SLEEP).result == StartResult.STARTED
    kill_supervisor(one)
    orphans = one.alive()
    assert two.start(SLEEP).result == StartResult.STARTED
    assert orphans
    assert one.alive() == orphans


def race(node, requests):
    with ThreadPoolExecutor(len(requests)) as pool:
        replies = list(pool.map(lambda request: node.verb("start", request), requests))
    assert [reply.stderr for reply in replies if reply.returncode] == []
    return [protocol.loads(StartReply, reply.stdout) for reply in replies]


def test_fifty_starts_of_one_job_start_it_once(node):
    replies = race(node, [StartRequest(node.workdir, node.spec(SLEEP))] * 50)
    assert Counter(reply.result for reply in replies) == {StartResult.STARTED: 1, StartResult.ATTACHED: 49}
    assert len({reply.state.child for reply in replies}) == 1


def test_of_ten_jobs_that_race_for_a_node_one_starts(node):
    replies = race(node, [StartRequest(node.workdir, node.spec(SLEEP, f"job-{n}")) for n in range(10)])
    assert Counter(reply.result for reply in replies) == {StartResult.STARTED: 1, StartResult.BUSY: 9}
    winner = next(reply.state.job_id for reply in replies if reply.state)
    assert {reply.holder.job_id for reply in replies if reply.holder} == {winner}


def test_kill_9_of_the_supervisor_is_seen_as_lost_with_its_orphans(node):
    node.start("import subprocess, time; subprocess.Popen(['setsid', 'sleep', '600']); print('up'); time.sleep(600)")
    node.until(lambda: node.log())
    kill_supervisor(node)
    reply = node.status()
    assert reply.state.phase == Phase.LOST
    assert set(reply.orphans) == node.alive()
    assert len(reply.orphans) == 2
    assert "kill -9" in reply.state.error
    assert jobs.log_is_held(node.paths.job("job"))


def test_a_lost_job_is_reaped_before_another_starts_and_never_starts_again(node):
    node.start("import subprocess, time; subprocess.Popen(['setsid', 'sleep', '600']); print('up'); time.sleep(600)")
    node.until(lambda: node.log())
    kill_supervisor(node)
    orphans = process.marked(node.workdir)
    reply = node.start(SLEEP, "next")
    assert (reply.result, reply.reaped) == (StartResult.STARTED, 2)
    assert not any(process.is_alive(identity) for identity in orphans)
    assert not jobs.log_is_held(node.paths.job("job"))
    lost = node.status()
    assert (lost.state.phase, lost.orphans) == (Phase.LOST, [])
    assert lost.state.ended_at > 0
    again = node.start(SLEEP)
    assert (again.result, again.state.phase) == (StartResult.ATTACHED, Phase.LOST)
    assert node.state("next").phase == Phase.RUNNING


def test_start_of_the_lost_job_itself_reaps_and_attaches(node):
    node.start(SLEEP)
    kill_supervisor(node)
    reply = node.start(SLEEP)
    assert (reply.result, reply.state.phase, reply.reaped) == (StartResult.ATTACHED, Phase.LOST, 1)
    assert not node.alive()


def test_orphans_without_a_marker_are_found_by_the_journal(node):
    node.start("import subprocess, time; subprocess.Popen(['env', '-i', 'setsid', 'sleep', '600']); time.sleep(600)")
    job = node.paths.job("job")
    node.until(lambda: len(records.read_processes(job)) == 2)
    hidden = records.read_processes(job) - process.marked(node.workdir)
    assert len(hidden) == 1
    kill_supervisor(node)
    node.start("pass", "next")
    assert not any(process.is_alive(identity) for identity in hidden)


def test_stop_of_a_lost_job_reaps_it(node):
    node.start(SLEEP)
    kill_supervisor(node)
    reply = node.stop(reason="requested")
    assert reply.stopped
    assert (reply.state.phase, reply.state.stop_reason, reply.state.killed) == (Phase.LOST, "requested", 1)
    assert not node.alive()
    assert node.stop().state.ended_at == reply.state.ended_at


def test_a_job_of_an_earlier_boot_is_lost(node):
    node.start("pass")
    node.wait()
    job = node.paths.job("job")
    state = records.read_state(job)
    state.phase = Phase.RUNNING
    state.supervisor = protocol.Identity(os.getpid(), process.identify(os.getpid()).start_ticks, "another-boot")
    records.write_state(job, state)
    assert node.state().phase == Phase.LOST
    assert "restarted" in node.state().error


def test_a_damaged_state_is_lost_not_absent(node):
    node.start("pass")
    node.wait()
    with open(node.paths.job("job").state, "w"):
        pass
    assert node.state().phase == Phase.LOST
    assert node.start("pass").result == StartResult.ATTACHED


def test_stop_and_status_of_an_unknown_job_make_nothing(node):
    reply = node.stop("never")
    assert (reply.state.phase, reply.stopped) == (Phase.ABSENT, True)
    assert node.state("never").phase == Phase.ABSENT
    assert jobs.jobs(JobsRequest(node.workdir)).jobs == []
    assert not Path(node.workdir).exists()


def test_status_brings_log_bytes_from_an_offset(node):
    node.start("import os; os.write(1, b'ab\\xff\\r\\ncd')")
    node.wait()
    reply = node.status(log_offset=1, max_bytes=4)
    assert (base64.b64decode(reply.log), reply.log_offset) == (b"b\xff\r\n", 1)
    assert base64.b64decode(node.status(log_offset=5, max_bytes=100).log) == b"cd"
    assert node.status(log_offset=99, max_bytes=100).log == ""


@pytest.mark.parametrize("job_id", ["", ".hidden", "a/b", "../x", "a\n", "ü", "x" * 161])
def test_bad_job_ids_are_refused(node, job_id):
    with pytest.raises(PathError, match="job id"):
        node.start("pass", job_id)


@pytest.mark.parametrize("name", ["state.json", "log", "../x", "a/b", ".x", ""])
def test_bad_file_names_are_refused_before_anything_happens(node, name):
    with pytest.raises(PathError, match="file name"):
        node.start("pass", files={name: "x"})
    assert not Path(node.workdir).exists()


def test_errors_are_one_line_and_never_repeat_the_request(node):
    secret = "LTAI-very-secret"
    for request in (
        f'{{"workdir": "{secret}',
        json.dumps({"workdir": "/tmp/x", "spec": {"job_id": secret, "argv": secret}}),
    ):
        reply = node.verb("start", request)
        assert (reply.returncode, reply.stdout) == (1, "")
        assert len(reply.stderr.splitlines()) == 1
        assert secret not in reply.stderr
    assert "unknown verb 'nonsense'" in node.verb("nonsense", "{}").stderr


def test_resume_files_complete_a_checkpoint_that_another_node_wrote(node, tmp_path):
    (tmp_path / "out" / "checkpoint-8").mkdir(parents=True)
    files = {"checkpoint-8/latest": "global_step8"}
    assert node.start("pass", output_dir=str(tmp_path / "out"), resume_files=files).result == StartResult.STARTED
    assert (tmp_path / "out" / "checkpoint-8" / "latest").read_text() == "global_step8"
    node.wait()
    refused = node.start("pass", "b", output_dir=str(tmp_path / "out"), resume_files={"../x": ""})
    assert (refused.result, "refused" in refused.error) == (StartResult.FAILED, True)
    missing = node.start("pass", "c", output_dir=str(tmp_path / "out"), resume_files={"checkpoint-9/latest": "x"})
    assert (missing.result, "checkpoint-9" in missing.error) == (StartResult.FAILED, True)
