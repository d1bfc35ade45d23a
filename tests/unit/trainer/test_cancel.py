"""A user's cancel ends every try that it is meant for, and those that are still on their way never begin."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from trainer import cancelled, process, stop
from trainer.lease import holders
from trainer.protocol import CancelReply, CancelRequest, Owner, Phase, StartRequest, StartResult, loads

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
OWNER = Owner("nightly", "run-1", "train", 3, 2, "http://airflow")


def try_(number: int, **more: object) -> Owner:
    return Owner(**{**vars(OWNER), "try_number": number, **more})


def cancel(node, owner=OWNER, **more):
    return stop.cancel(CancelRequest(node.workdir, owner, **more))


def test_a_cancel_ends_the_job_and_keeps_its_try_from_starting_again(node):
    node.start("import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); " + SLEEP, owner=OWNER)
    node.until(lambda: node.log())
    began = time.monotonic()
    reply = cancel(node, grace_s=1.0, reason="cleared")
    assert time.monotonic() - began < 0.5
    assert [state.job_id for state in reply.jobs] == ["job"]
    again = node.start(SLEEP, "next", owner=OWNER)
    assert (again.result, again.state) == (StartResult.CANCELLED, None)
    assert node.start(SLEEP, owner=OWNER).result == StartResult.CANCELLED
    assert (node.wait().phase, node.state().stop_reason) == (Phase.KILLED, "cleared")
    assert not node.alive()


def test_only_tries_up_to_the_cancelled_one_are_meant(node):
    cancel(node)
    for hold_s in (0, 30):
        for number in (0, 1, 2):
            assert node.start(SLEEP, owner=try_(number), hold_s=hold_s).result == StartResult.CANCELLED
    assert node.start(SLEEP, owner=try_(3)).result == StartResult.STARTED
    assert cancel(node).jobs == []
    assert node.state().phase == Phase.RUNNING
    assert [state.job_id for state in cancel(node, try_(7)).jobs] == ["job"]
    assert cancel(node, try_(1)).jobs == []  # an older word, come late, takes nothing back
    assert node.start(SLEEP, "b", owner=try_(7)).result == StartResult.CANCELLED


@pytest.mark.parametrize(
    "other", [{"dag_id": "x"}, {"run_id": "x"}, {"task_id": "x"}, {"map_index": 4}, {"origin": "http://other"}]
)
def test_other_tasks_are_left_alone(node, other):
    cancel(node, try_(9, **other))
    assert node.start(SLEEP, owner=OWNER).result == StartResult.STARTED
    assert cancel(node, try_(9, **other)).jobs == []
    assert node.state().phase == Phase.RUNNING


def test_a_prepared_job_is_cancelled(node):
    node.start(SLEEP, owner=OWNER, hold_s=60)
    assert len(cancel(node).jobs) == 1
    state = node.wait()
    assert (state.phase, state.stop_reason, state.child) == (Phase.KILLED, "requested", None)


def test_a_lost_job_that_still_trains_is_cancelled(node):
    supervisor = node.start(SLEEP, owner=OWNER).state.supervisor
    os.kill(supervisor.pid, signal.SIGKILL)
    node.until(lambda: not process.is_alive(supervisor))
    assert node.alive()
    assert [(state.phase, state.killed) for state in cancel(node).jobs] == [(Phase.LOST, 1)]
    assert not node.alive()


def test_ended_jobs_are_not_asked(node):
    node.start("pass", owner=OWNER)
    node.wait()
    assert cancel(node).jobs == []


def test_all_jobs_of_the_task_are_ended(node):
    for gpu in range(3):
        node.start(SLEEP, f"job-{gpu}", gpus=[gpu], owner=try_(gpu))
    assert [state.job_id for state in cancel(node, try_(1)).jobs] == ["job-0", "job-1"]
    assert node.state("job-2").phase == Phase.RUNNING


def test_a_start_in_flight_is_cancelled_too(node):
    """Whatever the order in which the node takes them up: after both, nothing of this try runs."""
    requests = [StartRequest(node.workdir, node.spec(SLEEP, f"job-{n}", owner=OWNER), n % 2 * 30.0) for n in range(6)]
    starters = [node.popen("start", request) for request in requests]
    time.sleep(0.35)
    done = node.verb("cancel", CancelRequest(node.workdir, OWNER, grace_s=0))
    asked = loads(CancelReply, done.stdout).jobs
    for starter in starters:
        with starter:
            assert '"result":"' in starter.stdout.read()
    for state in asked:
        assert node.wait(state.job_id).phase == Phase.KILLED
    assert (holders(node.paths), node.alive()) == ([], set())
    assert node.start(SLEEP, owner=try_(3)).result == StartResult.STARTED


def test_a_cancel_does_not_wait_for_anything_but_a_start(node):
    node.start("import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); " + SLEEP, owner=OWNER)
    node.until(lambda: node.log())
    times = []

    def measure():
        began = time.monotonic()
        cancel(node, grace_s=2.0)
        times.append(time.monotonic() - began)

    threads = [threading.Thread(target=measure) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(times) < 1.5


@pytest.mark.parametrize("nobody", [Owner(), Owner("dag", "run"), Owner(dag_id="dag", task_id="train")])
def test_a_cancel_of_nobody_is_refused(node, nobody):
    node.start(SLEEP)
    with pytest.raises(ValueError, match="must name dag_id, run_id and task_id"):
        cancel(node, nobody)
    assert node.state().phase == Phase.RUNNING


def test_the_newest_thousand_are_remembered(node, monkeypatch):
    monkeypatch.setattr(cancelled, "KEPT", 5)
    owners = [try_(1, run_id=f"run-{n}") for n in range(7)]
    for owner in (*owners[:3], owners[0], *owners[3:]):
        cancel(node, owner)
    known = [cancelled.is_cancelled(node.paths, owner) for owner in owners]
    assert known == [True, False, False, True, True, True, True]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"x": "y"}'])
def test_a_damaged_memory_keeps_nobody_from_starting(node, damage):
    cancel(node)
    with open(node.paths.cancelled, "w") as file:
        file.write(damage)
    assert node.start("pass", owner=OWNER).result == StartResult.STARTED
    cancel(node)
    assert cancelled.is_cancelled(node.paths, OWNER)
