"""Prepare and commit: nothing trains before the word, and a word that comes too late starts nothing."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from trainer import process, protocol, records, start
from trainer.lease import holders
from trainer.protocol import (
    CommitReply,
    CommitRequest,
    Phase,
    StartReply,
    StartRequest,
    StartResult,
    StopReason,
)

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


def commit(node, job_id="job"):
    return start.commit(CommitRequest(node.workdir, job_id))


def free(node):
    """Nobody holds a lease and nothing trains."""
    return not holders(node.paths) and not node.alive()


def test_prepared_then_committed(node):
    prepared = node.start(SLEEP, hold_s=30)
    assert (prepared.result, prepared.state.phase, prepared.state.child) == ("started", Phase.PREPARING, None)
    assert not node.alive()
    assert node.start(SLEEP, "other").holder.job_id == "job"
    for hold_s in (0, 30):
        again = node.start(SLEEP, hold_s=hold_s)
        assert (again.result, again.state.phase) == (StartResult.ATTACHED, Phase.PREPARING)
    reply = commit(node)
    assert (reply.error, reply.state.phase) == (None, Phase.RUNNING)
    node.until(lambda: node.log() == b"up\n")
    assert commit(node).error is None
    assert len(node.alive()) == 1


def test_both_verbs_over_the_wire(node):
    done = node.verb("start", StartRequest(node.workdir, node.spec(SLEEP), hold_s=30))
    assert protocol.loads(StartReply, done.stdout).state.phase == Phase.PREPARING
    done = node.verb("commit", CommitRequest(node.workdir, "job"))
    assert protocol.loads(CommitReply, done.stdout).state.phase == Phase.RUNNING


def test_without_a_commit_it_ends_itself_and_a_late_one_starts_nothing(node):
    node.start(SLEEP, hold_s=0.4)
    state = node.wait(timeout_s=5)
    assert (state.phase, state.stop_reason, state.child) == (Phase.KILLED, StopReason.NOT_COMMITTED, None)
    assert "not_committed" in commit(node).error
    assert free(node)
    assert not Path(node.paths.job("job").log).exists()
    assert node.start(SLEEP, "next").result == StartResult.STARTED


def test_a_commit_that_lies_there_when_the_hold_is_over_is_too_late(node):
    supervisor = node.start(SLEEP, hold_s=0.5).state.supervisor
    os.kill(supervisor.pid, signal.SIGSTOP)  # it sees the word only when its time has run out
    time.sleep(0.7)
    records.write_commit(node.paths.job("job"))
    os.kill(supervisor.pid, signal.SIGCONT)
    assert node.wait().stop_reason == StopReason.NOT_COMMITTED
    assert free(node)


def test_a_commit_is_taken_up_when_its_signal_is_lost(node):
    node.start(SLEEP, hold_s=30)
    records.write_commit(node.paths.job("job"))
    node.until(lambda: node.state().phase == Phase.RUNNING, 5)


def test_commit_of_what_is_not_there_or_has_ended(node):
    assert "no job never" in commit(node, "never").error
    node.start("raise SystemExit(3)")
    node.wait()
    assert "exit code 3" in commit(node).error


def test_commit_while_the_job_is_being_stopped(node):
    node.start("import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)")
    node.until(lambda: node.log())
    node.stop(wait_s=0, grace_s=3)
    node.until(lambda: node.state().phase == Phase.STOPPING)
    assert "being stopped (requested)" in commit(node).error


def test_a_training_that_ends_at_once_was_committed_all_the_same(node):
    node.start("pass", hold_s=30)
    assert commit(node).error is None
    assert node.wait().exit_code == 0


def test_a_stop_ends_a_prepared_job_that_never_trains(node):
    node.start(SLEEP, hold_s=60)
    began = time.monotonic()
    reply = node.stop(reason="requested")
    assert time.monotonic() - began < 2
    assert reply.stopped
    assert (reply.state.phase, reply.state.stop_reason, reply.state.child) == (Phase.KILLED, "requested", None)
    assert "requested" in commit(node).error
    assert free(node)


def test_kill_9_of_a_supervisor_that_prepares_leaves_nothing(node):
    supervisor = node.start(SLEEP, hold_s=60).state.supervisor
    os.kill(supervisor.pid, signal.SIGKILL)
    node.until(lambda: not process.is_alive(supervisor))
    assert node.state().phase == Phase.LOST
    assert "lost" in commit(node).error
    assert free(node)
    assert node.start(SLEEP, hold_s=60).state.phase == Phase.LOST
    assert node.start(SLEEP, "next", hold_s=60).result == StartResult.STARTED


def test_the_deadline_counts_for_a_prepared_job_too(node):
    node.start(SLEEP, hold_s=60, deadline=time.time() + 1.0)
    assert node.wait(timeout_s=5).stop_reason == StopReason.DEADLINE


def test_what_cannot_be_launched_after_the_commit_ends_with_the_reason(node, tmp_path):
    folder = tmp_path / "cwd"
    folder.mkdir()
    node.start(SLEEP, hold_s=60, cwd=str(folder))
    folder.rmdir()
    assert "cannot start the training" in commit(node).error
    state = node.wait()
    assert (state.phase, state.exit_code) == (Phase.EXITED, 127)
    assert free(node)


@pytest.mark.parametrize("more", [{"cwd": "/no/such/folder"}, {"port": 0}, {"gpus": []}, {"gpus": [1, 1]}])
def test_what_cannot_start_is_not_prepared(node, more):
    reply = node.start(SLEEP, hold_s=60, **more)
    assert (reply.result, bool(reply.error)) == (StartResult.FAILED, True)
    assert node.state().phase == Phase.ABSENT
    assert free(node)


def test_a_job_is_on_record_before_the_next_verb_even_when_its_starter_is_killed(node):
    """The supervisor keeps the start lock until then, so that no stop and no cancel misses it."""
    for number in range(4):
        starter = node.popen("start", StartRequest(node.workdir, node.spec(SLEEP, f"job-{number}"), hold_s=30))
        folder = Path(node.paths.job(f"job-{number}").folder)
        node.until(lambda folder=folder: (folder / "supervisor.log").exists())
        starter.kill()
        with starter:
            pass
        assert node.stop(f"job-{number}").state.phase == Phase.KILLED
    assert free(node)


# -- the port -----------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_taken_port_is_named_with_the_process_that_has_it(node):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reply = node.start(SLEEP, hold_s=30, port=port)
    assert reply.result == StartResult.FAILED
    assert f"port {port} is taken by pid {os.getpid()} (" in reply.error
    assert "pytest" in reply.error
    assert free(node)
    assert node.start(SLEEP, hold_s=30, port=port).result == StartResult.STARTED


def test_the_training_gets_the_port_that_was_held_for_it(node):
    port = free_port()
    code = f"import socket, time; s = socket.create_server(('', {port})); print('bound', flush=True); time.sleep(600)"
    node.start(code, hold_s=30, port=port)
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 5):
        pass
    assert commit(node).error is None
    node.until(lambda: node.log() == b"bound\n")


def test_a_port_is_promised_to_one_job_on_the_machine_until_it_ends(make_node):
    one, two, port = make_node("one"), make_node("two"), free_port()
    one.start(SLEEP, hold_s=30, port=port)
    refused = two.start(SLEEP, hold_s=30, port=port)
    assert f"port {port} is taken by pid {one.state().supervisor.pid} (" in refused.error
    commit(one)  # it trains, but does not listen yet
    assert two.start(SLEEP, port=port).result == StartResult.FAILED
    one.stop(grace_s=0)
    assert two.start(SLEEP, port=port).result == StartResult.STARTED


def test_a_port_that_this_user_may_not_use(node, monkeypatch):
    from trainer import ports

    def refuse(_port):
        raise PermissionError(13, "Permission denied")
        yield

    monkeypatch.setattr(ports, "_bind", refuse)
    with pytest.raises(OSError, match="port 80 cannot be used: Permission denied"):
        ports.PortPromise(80)


def test_many_commits_at_once_start_one_training(node):
    node.start(SLEEP, hold_s=30)
    replies = []
    threads = [threading.Thread(target=lambda: replies.append(commit(node))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reply.error for reply in replies] == [None] * 8
    assert len({reply.state.child for reply in replies}) == 1
