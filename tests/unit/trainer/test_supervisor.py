"""A supervisor with real processes: what it starts, what it sees, and how it brings each kind of tree to an end."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from trainer import process, records
from trainer.protocol import Owner, Phase, StartRequest, StartResult, StopReason
from trainer.start import start

SLEEP = "import time; time.sleep(600)"

#: A launcher with ranks as torchrun starts them: each in a session of its own, RANK in its environment only.
LAUNCHER = """
import os, subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, '-S', '-E', '-c', code], env={{**os.environ, 'RANK': str(rank)}},
                          start_new_session=True) for rank, code in enumerate({codes!r})]
print('ranks', *[rank.pid for rank in ranks], flush=True)
{then}
"""
COLLECT = "while True:\n    [rank.poll() for rank in ranks]; time.sleep(0.1)"


def launcher(*codes: str, then: str = COLLECT) -> str:
    return LAUNCHER.format(codes=list(codes), then=then)


def test_a_job_runs_to_its_end_and_keeps_its_exit_code(node):
    owner = Owner("dag", "run", "train", origin="http://airflow")
    reply = node.start("print('hello'); raise SystemExit(7)", owner=owner)
    assert reply.result == StartResult.STARTED
    state = node.wait()
    assert (state.phase, state.exit_code, state.signal, state.stop_reason) == (Phase.EXITED, 7, None, None)
    assert state.owner == owner
    assert node.log() == b"hello\n"
    assert state.log_bytes == 6
    assert state.ended_at >= state.started_at > 0


def test_the_training_gets_its_environment_files_folder_and_an_empty_stdin(node):
    code = """
import json, os, signal, sys
ignored = [s for s in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
           if signal.getsignal(s) == signal.SIG_IGN]
print(json.dumps({'argv': sys.argv[1:], 'A': os.environ['A'], 'mark': os.environ['SWIFT_TRAINER_JOB'],
  'cwd': os.getcwd(), 'stdin': sys.stdin.read(), 'file': open(sys.argv[1]).read(), 'ignored': ignored,
  'sid': os.getsid(0) == os.getpid(), 'fds': sorted(os.listdir('/proc/self/fd'))[:-1]}))
"""
    spec = node.spec(code, env={"A": "in {job_dir} with {braces}"}, files={"recipe.yaml": "x: 1 # 学习\n"})
    spec.argv.append("{job_dir}/recipe.yaml")
    reply = node.verb("start", StartRequest(node.workdir, spec))
    assert reply.returncode == 0, reply.stderr
    node.wait()
    seen = json.loads(node.log())
    folder = node.paths.job("job").folder
    assert seen["argv"] == [f"{folder}/recipe.yaml"]
    assert seen["A"] == f"in {folder} with {{braces}}"
    assert seen["mark"] == process.marker(node.workdir, "job")
    assert (seen["cwd"], seen["stdin"], seen["file"]) == (folder, "", "x: 1 # 学习\n")
    assert (seen["ignored"], seen["sid"], seen["fds"]) == ([], True, ["0", "1", "2"])


def test_files_of_the_agent_are_private(node):
    node.start("pass", files={"a.json": "{}"})
    node.wait()
    found = list(Path(node.workdir).rglob("*"))
    assert len(found) > 10
    assert [path for path in found if path.stat().st_mode & 0o077] == []


def test_log_bytes_are_exact(node):
    code = """
import os, hashlib
data = b''.join(hashlib.sha256(b'%d' % i).digest() + bytes([13, 10, 0, 255]) for i in range(30000))
left = memoryview(data)
while left:
    left = left[os.write(1, left[:70001]):]
os.write(2, b'end')
"""
    node.start(code)
    state = node.wait()
    data = b"".join(hashlib.sha256(b"%d" % i).digest() + bytes([13, 10, 0, 255]) for i in range(30000)) + b"end"
    assert hashlib.sha256(node.log()).hexdigest() == hashlib.sha256(data).hexdigest()
    assert state.log_bytes == len(data)


def test_a_training_that_dies_of_a_signal_is_killed_with_that_signal(node):
    node.start("import os; os.kill(os.getpid(), 11)")
    state = node.wait()
    assert (state.phase, state.signal, state.exit_code, state.stop_reason) == (Phase.KILLED, 11, None, None)


def test_what_cannot_start_leaves_nothing_behind(node):
    spec = node.spec("pass")
    spec.argv = ["/no/such/program"]
    reply = start(StartRequest(node.workdir, spec))
    assert reply.result == StartResult.FAILED
    assert "/no/such/program" in reply.error
    assert node.state().phase == Phase.ABSENT
    assert not Path(node.paths.job("job").folder).exists()
    assert node.start("pass").result == StartResult.STARTED


def test_stop_is_gentle_first(node):
    code = """
import signal, time, sys
def end(*_):
    time.sleep(0.3); print('saved', flush=True); sys.exit(3)
signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(600)
"""
    node.start(code, grace_s=20)
    node.until(lambda: node.log() == b"ready\n")
    reply = node.stop(reason=StopReason.SUPERSEDED)
    assert reply.stopped
    assert (reply.state.phase, reply.state.stop_reason, reply.state.killed) == (Phase.KILLED, "superseded", 0)
    assert (node.log(), reply.state.exit_code) == (b"ready\nsaved\n", 3)


def test_stop_returns_at_once_without_wait(node):
    node.start("import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)")
    node.until(lambda: node.log() == b"1\n")
    began = time.monotonic()
    reply = node.stop(wait_s=0.0, grace_s=0.5)
    assert time.monotonic() - began < 1.0
    assert not reply.stopped
    assert node.wait().stop_reason == "requested"


TREES = {
    "ignores TERM": "signal.signal(15, signal.SIG_IGN)",
    "setsid daemon": "subprocess.Popen(['setsid', 'sleep', '600'])",
    "no marker": "subprocess.Popen(['env', '-i', 'setsid', 'sleep', '600'])",
    "double fork": "os.fork() or (os.setsid(), os.fork() and os._exit(0), signal.signal(15, signal.SIG_IGN))",
    "stopped": "os.kill(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, 19)",
}


@pytest.mark.parametrize("name", TREES)
def test_no_tree_survives_a_stop(node, name):
    node.start(f"import os, signal, subprocess, time; {TREES[name]}; print('up', flush=True); time.sleep(600)")
    node.until(lambda: b"up" in node.log())
    time.sleep(0.1)
    supervisor = node.state().supervisor
    tree = process.descendants([supervisor.pid])
    began = time.monotonic()
    reply = node.stop(grace_s=0.3)
    assert time.monotonic() - began < 5
    assert reply.stopped
    assert reply.state.survivors == []
    assert tree
    assert not any(process.is_alive(identity) for identity in tree)
    node.until(lambda: not process.is_alive(supervisor))


def test_the_grace_is_for_the_tree_not_for_the_child(node):
    slow = "import signal, sys, time\ndef end(*_):\n    time.sleep(1); print('clean', flush=True); sys.exit()\n"
    slow += "signal.signal(15, end); print('up', flush=True); time.sleep(600)"
    node.start(f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {slow!r}]).wait()", grace_s=20)
    node.until(lambda: b"up" in node.log())
    reply = node.stop()
    assert reply.stopped
    assert (reply.state.signal, reply.state.killed) == (15, 0)
    assert b"clean" in node.log()


def test_a_second_stop_may_be_less_patient(node):
    node.start("import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)")
    node.until(lambda: node.log() == b"1\n")
    node.stop(wait_s=0.0, grace_s=500)
    node.until(lambda: node.state().phase == Phase.STOPPING)
    assert node.stop(grace_s=0.0, reason="impatient").stopped
    assert node.state().stop_reason == "requested"


def test_a_stop_request_survives_the_loss_of_its_signal(node):
    node.start(SLEEP)
    records.write_stop(node.paths.job("job"), records.StopIntent("requested", 1.0))
    assert node.wait().stop_reason == "requested"


def test_the_deadline_is_the_supervisors_own(node):
    node.start("print(1)\n" + SLEEP, deadline=time.time() + 0.8, grace_s=1)
    state = node.wait()
    assert (state.phase, state.stop_reason) == (Phase.KILLED, StopReason.DEADLINE)


@pytest.mark.parametrize("hours", [-2, 2], ids=["back", "forward"])
def test_a_clock_that_is_set_while_the_job_runs_moves_no_deadline(node, monkeypatch, hours):
    real, began = time.time, time.time()
    # The supervisor is a fork of this process, and so has this clock.
    monkeypatch.setattr(time, "time", lambda: real() + (3600 * hours if real() > began + 1 else 0))
    node.start("print(1)\n" + SLEEP, deadline=began + 4, grace_s=1)
    node.until(lambda: abs(node.state().updated_at - real()) > 3000)
    first = node.state().heartbeat
    node.until(lambda: node.state().heartbeat > first)
    if real() < began + 3:
        assert node.state().phase == Phase.RUNNING
    state = node.wait()
    assert (state.phase, state.stop_reason) == (Phase.KILLED, StopReason.DEADLINE)
    assert 3.5 < real() - began < 15


DIES = "import os, time; time.sleep(1); "
SLOW = {
    "killed rank": launcher(SLEEP, DIES + "os.kill(os.getpid(), 9)"),
    "failed rank": launcher(SLEEP, DIES + "os._exit(3)"),
    "ended rank": launcher(
        "import time; time.sleep(5)", "import time; time.sleep(1)", then="sys.exit(ranks[0].wait())"
    ),
    "launcher that ends": launcher(
        SLEEP,
        DIES + "os.abort()",
        then="while not any(r.poll() for r in ranks): time.sleep(.1)\n[r.kill() for r in ranks]; sys.exit(1)",
    ),
    "launcher that dies": launcher(SLEEP, SLEEP, then="time.sleep(1); os.kill(os.getpid(), 9)"),
    "daemon": "import subprocess; subprocess.Popen(['env', '-i', 'setsid', 'sleep', '600']); raise SystemExit(4)",
}


@pytest.fixture(scope="module")
def slow(make_shared_node):
    """Jobs that take seconds by design, on one node each, all at once."""
    nodes = {name: make_shared_node(name) for name in SLOW}
    for name, node in nodes.items():
        assert node.start(SLOW[name], grace_s=60).result == StartResult.STARTED
    return nodes


@pytest.mark.parametrize(("name", "how"), [("killed rank", "SIGKILL"), ("failed rank", "exit code 3")])
def test_a_dead_rank_stops_the_whole_tree(slow, name, how):
    state = slow[name].wait()
    pids = slow[name].log().split()[1:]
    assert (state.phase, state.stop_reason) == (Phase.KILLED, StopReason.RANK_FAILED)
    assert state.error == f"rank 1 (pid {pids[1].decode()}) died: {how}"
    assert state.ended_at - state.started_at < 1 + 5
    assert not slow[name].alive()


def test_a_rank_that_ends_cleanly_is_no_failure(slow):
    state = slow["ended rank"].wait()
    assert (state.phase, state.exit_code, state.error) == (Phase.EXITED, 0, None)


def test_a_launcher_that_ends_by_itself_after_a_rank_died_keeps_its_own_exit_code(slow):
    state = slow["launcher that ends"].wait()
    assert (state.phase, state.exit_code) == (Phase.EXITED, 1)
    assert "rank 1" in state.error
    assert "SIGABRT" in state.error


def test_ranks_do_not_outlive_their_launcher_and_are_not_blamed(slow):
    state = slow["launcher that dies"].wait()
    assert (state.phase, state.signal, state.killed, state.error) == (Phase.KILLED, 9, 2, None)
    assert not slow["launcher that dies"].alive()


def test_a_daemon_that_outlives_the_training_is_ended_and_the_exit_code_kept(slow):
    state = slow["daemon"].wait()
    assert (state.phase, state.exit_code, state.killed) == (Phase.EXITED, 4, 1)
    assert 4.5 < state.ended_at - state.started_at < 9


def test_progress_and_heartbeat_are_in_the_state(node, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "logging.jsonl").write_text('{"loss": 9, "global_step/max_steps": "51/90"}\n')  # of an earlier generation
    code = f"""
import time
time.sleep(0.3)
with open({str(output / "logging.jsonl")!r}, 'a') as log:
    log.write('{{"loss": 1.5, "learning_rate": 0.1, "global_step/max_steps": "41/90", "elapsed_time": "1m 5s"}}\\n')
time.sleep(600)
"""
    node.start(code, output_dir=str(output))
    node.until(lambda: node.state().progress)
    progress = node.state().progress
    assert (progress.step, progress.max_steps, progress.loss, progress.elapsed_s) == (41, 90, 1.5, 65.0)
    first = node.state().heartbeat
    node.until(lambda: node.state().heartbeat > first + 1, 5)


def test_a_stale_build_lock_is_removed_before_the_start_and_a_live_one_is_not(node, tmp_path):
    stale, live = tmp_path / "ext/a/lock", tmp_path / "ext/b/lock"
    for path in (stale, live):
        path.parent.mkdir(parents=True)
        path.touch()
    with live.open():
        node.start("pass", env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "ext")})
        node.wait()
    assert not stale.exists()
    assert live.exists()
    assert str(stale) in Path(node.paths.job("job").supervisor_log).read_text()


def test_the_supervisor_carries_nothing_of_the_session_that_started_it(node):
    node.start(SLEEP)
    pid = node.state().supervisor.pid
    assert os.getsid(pid) not in (os.getsid(0), 0)
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    targets = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    assert not {target for target in targets if "pytest" in target and node.workdir not in target}
    assert Path(f"/proc/{pid}/comm").read_text() == "swift-job\n"
