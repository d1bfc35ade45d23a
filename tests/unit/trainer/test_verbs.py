"""The zipapp and its small verbs: bundle, probe, listen and reach, prune; and all of it on the oldest Python."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from trainer import bundle, cli, network, probe, process, protocol, torch_locks
from trainer.paths import NodePaths, PathError
from trainer.protocol import (
    JobState,
    ListenRequest,
    Phase,
    ProbeReply,
    ProbeRequest,
    PruneRequest,
    ReachRequest,
    StartReply,
    StartRequest,
    StatusReply,
    StatusRequest,
    StopReply,
    StopRequest,
)
from trainer.prune import prune

# -- bundle -----------------------------------------------------------------------------------------------------


def test_the_bundle_is_deterministic_and_holds_the_whole_package_and_nothing_else():
    digest, data = bundle.agent_bundle()
    bundle.agent_bundle.cache_clear()
    assert bundle.agent_bundle() == (digest, data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert names == sorted(names)
    assert {"__main__.py", "trainer/__init__.py", "trainer/store/client.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)


def test_the_bundle_of_an_installed_copy_is_the_same(tmp_path):
    shutil.copytree(Path(bundle.__file__).parent, tmp_path / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "trainer" / "Dockerfile").write_text("FROM x")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from trainer.bundle import agent_bundle as a; print(a()[0])"
    done = subprocess.run([sys.executable, "-I", "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == bundle.agent_bundle()[0]


def test_every_verb_has_a_function_and_imports_only_what_it_needs(agent):
    for module, function, request in cli.VERBS.values():
        assert callable(getattr(__import__(module, fromlist=[function]), function))
        assert hasattr(protocol, request)
    code = "import sys; sys.argv = ['x', 'status']; sys.path.insert(0, %r); import trainer.jobs; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code % str(agent)], capture_output=True, text=True, check=True)
    assert not {"oss2", "requests", "socket", "trainer.store", "trainer.supervisor"} & set(done.stdout.split())


# -- the oldest Python ------------------------------------------------------------------------------------------


def find_python39() -> str | None:
    found = shutil.which("python3.9")
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [found] if found else []
    candidates += [str(path) for path in versions.glob("3.9*/bin/python")]
    for python in candidates:
        done = subprocess.run([python, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True)
        if done.stdout.strip() == "(3, 9)":
            return python
    return None


def test_the_agent_runs_on_python_39(node, tmp_path):
    python = find_python39()
    if python is None:
        pytest.skip("no Python 3.9 on PATH or below ~/.pyenv")

    def call(verb, request, reply):
        done = node.verb(verb, request, python)
        assert (done.returncode, done.stderr) == (0, "")
        return protocol.loads(reply, done.stdout)

    probed = call("probe", ProbeRequest(node.workdir, ["pip"]), ProbeReply)
    assert probed.python_version.startswith("3.9")
    output = tmp_path / "out"
    for step in (1, 2):
        (output / f"checkpoint-{step}").mkdir(parents=True)
    code = "import time\nfor i in range(600): print('step', i, flush=True); time.sleep(0.1)"
    spec = node.spec(code, output_dir=str(output), gpus=[0], port=free_port())
    assert call("start", StartRequest(node.workdir, spec, hold_s=60), StartReply).state.phase == Phase.PREPARING
    assert call("commit", protocol.CommitRequest(node.workdir, "job"), protocol.CommitReply).error is None
    node.until(lambda: b"step 3" in node.log())
    assert call("commit", protocol.CommitRequest(node.workdir, "job"), protocol.CommitReply).error is None
    status = call("status", StatusRequest(node.workdir, "job", max_bytes=100), StatusReply)
    assert (status.state.phase, status.log[:8]) == (Phase.RUNNING, "c3RlcCAw")
    assert call("stop", StopRequest(node.workdir, "job", wait_s=10), StopReply).stopped
    assert [job.job_id for job in call("jobs", protocol.JobsRequest(node.workdir), protocol.JobsReply).jobs] == ["job"]
    assert call("cancel", protocol.CancelRequest(node.workdir, protocol.Owner("d", "r", "t")), protocol.CancelReply)
    listed = call("checkpoints", protocol.CheckpointsRequest(str(output)), protocol.CheckpointsReply)
    assert len(listed.checkpoints) == 2
    pruned = call("prune", PruneRequest(str(output), ["checkpoint-1"]), protocol.PruneReply)
    assert list(pruned.deleted) == ["checkpoint-1"]
    source = tmp_path / "data.jsonl"
    source.write_text("{}\n")
    request = protocol.StageRequest(node.workdir, [protocol.StageItem("data", str(source))])
    assert call("stage", request, protocol.StageReply).items[0].error is None


# -- probe ------------------------------------------------------------------------------------------------------


def test_probe_tells_facts(node):
    reply = probe.probe(ProbeRequest(node.workdir, ["pytest", "no-such-package"], shared_dir="/no/such/folder"))
    assert reply.packages["pytest"] == pytest.__version__
    assert reply.packages["no-such-package"] is None
    assert reply.workdir_error is None
    assert "No such file" in reply.shared_dir_error
    assert reply.python_path == sys.executable
    assert min(reply.disk_free, reply.memory_total, reply.memory_available, reply.shm_free, reply.cpu_count) > 0
    assert reply.boot_id == process.boot_id()
    assert reply.holder is None
    assert list(Path(node.paths.locks).iterdir()) == []


def test_probe_of_a_place_that_cannot_be_made(node, tmp_path):
    (tmp_path / "file").touch()
    assert "Not a directory" in probe.probe(ProbeRequest(str(tmp_path / "file" / "work"))).workdir_error


def test_probe_names_the_holder(node):
    node.start("import time; time.sleep(600)")
    assert probe.probe(ProbeRequest(node.workdir)).holder.job_id == "job"


def test_gpus_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA H200, 143771, 12'\necho '1, NVIDIA H200, 143771, 0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpus, error = probe.read_gpus()
    assert error is None
    assert [(gpu.index, gpu.name, gpu.memory_used >> 20) for gpu in gpus] == [
        (0, "NVIDIA H200", 12),
        (1, "NVIDIA H200", 0),
    ]
    program.write_text("#!/bin/sh\necho 'Driver/library version mismatch'; exit 18\n")
    assert probe.read_gpus() == ([], "nvidia-smi: Driver/library version mismatch (exit code 18)")
    monkeypatch.setenv("PATH", "/nowhere")
    assert probe.read_gpus() == ([], "nvidia-smi was not found")


# -- listen and reach ---------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_listen_and_reach_meet_whoever_comes_first():
    port, replies = free_port(), []
    caller = threading.Thread(target=lambda: replies.append(network.reach(ReachRequest("127.0.0.1", port, "n1", 5))))
    caller.start()
    reply = network.listen(ListenRequest(port, "n1", timeout_s=5))
    caller.join()
    assert (reply.callers, reply.error, replies[0].error) == (1, None, None)
    assert replies[0].round_trip_s < 2


def test_reach_knows_the_wrong_answer():
    port, replies = free_port(), []
    listener = threading.Thread(target=lambda: replies.append(network.listen(ListenRequest(port, "theirs", 1, 1))))
    listener.start()
    error = network.reach(ReachRequest("127.0.0.1", port, "ours", 0.8)).error
    listener.join()
    assert "something else answers" in error
    assert replies[0].callers == 0


def test_reach_and_listen_tell_why_not():
    port = free_port()
    assert "refused" in network.reach(ReachRequest("127.0.0.1", port, "n", 0.3)).error
    with socket.create_server(("", port)):
        assert f"port {port}" in network.listen(ListenRequest(port, "n", timeout_s=0.3)).error


# -- prune --------------------------------------------------------------------------------------------------------


def test_prune_deletes_what_it_may(tmp_path):
    for step in (1, 2, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "model").write_bytes(b"x" * step)
    (tmp_path / "checkpoint-9").symlink_to(tmp_path / "checkpoint-2")
    (tmp_path / "runs").mkdir()
    (tmp_path / "last-checkpoint").symlink_to("checkpoint-3")
    (tmp_path / ".trash-checkpoint-0-1").mkdir()
    names = ["checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint-9", "runs", "../x", "checkpoint-77"]
    dry = prune(PruneRequest(str(tmp_path), names, keep=["checkpoint-2"], dry_run=True))
    assert dry.deleted == {"checkpoint-1": 1, "checkpoint-77": 0}
    assert (tmp_path / "checkpoint-1").exists()
    reply = prune(PruneRequest(str(tmp_path), names, keep=["checkpoint-2"]))
    assert reply == dry
    assert set(reply.errors) == {"checkpoint-2", "checkpoint-3", "checkpoint-9", "runs", "../x"}
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"checkpoint-2", "checkpoint-3", "checkpoint-9", "runs", "last-checkpoint"}


# -- small parts ----------------------------------------------------------------------------------------------------


def test_paths_outside_the_work_folder_are_refused(tmp_path):
    node = NodePaths(str(tmp_path))
    (tmp_path / "link").symlink_to("/etc")
    assert node.inside("cache", "x") == str(tmp_path / "cache" / "x")
    for parts in (("..", "x"), ("/etc",), ("link", "passwd")):
        with pytest.raises(PathError, match="outside"):
            node.inside(*parts)
    for workdir in ("relative", "", "/", "//"):
        with pytest.raises(PathError, match="absolute"):
            NodePaths(workdir)


def test_an_identity_is_not_fooled_by_a_reused_pid():
    me = process.identify(os.getpid())
    assert process.is_alive(me)
    for other in ({"start_ticks": me.start_ticks + 1}, {"boot_id": "x"}):
        imposter = protocol.from_dict(protocol.Identity, {**protocol.to_dict(me), **other})
        assert not process.is_alive(imposter)
        assert not process.send_signal(imposter, 9)
    assert not process.is_alive(None)


def test_signals_work_where_the_kernel_has_no_pidfds(monkeypatch):
    monkeypatch.setattr(process, "open_pidfd", lambda _pid: None)
    child = subprocess.Popen(["sleep", "600"])
    assert process.send_signal(process.identify(child.pid), 15)
    assert child.wait() == -15


def test_a_command_name_with_brackets_and_blanks_is_no_trouble(tmp_path):
    program = tmp_path / "a) (b"
    shutil.copy(shutil.which("sleep"), program)
    child = subprocess.Popen([program, "600"])
    try:
        assert process.read_stat(child.pid).ppid == os.getpid()
    finally:
        child.kill()
        child.wait()


def test_an_old_lock_on_a_network_file_system_is_removed_a_young_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_locks, "file_system", lambda _path: "nfs4")
    young, old = tmp_path / "a" / "lock", tmp_path / "b" / "lock"
    for path in (young, old):
        path.parent.mkdir()
        path.touch()
    os.utime(old, (1, 1))
    assert torch_locks.remove_stale_locks(str(tmp_path)) == [str(old)]
    assert torch_locks.file_system("/proc/self") != ""


def test_requests_and_replies_survive_the_wire_and_unknown_keys():
    state = JobState("j", Phase.RUNNING, progress=protocol.Progress(1, 2, loss=0.5))
    assert protocol.loads(JobState, protocol.dumps(state)) == state
    assert protocol.loads(JobState, json.dumps({"job_id": "j", "phase": "running", "new": 1})).phase == "running"
    for text in ("{}", "[]", '{"job_id": 1, "phase": "x"}', "nonsense"):
        with pytest.raises(protocol.ProtocolError):
            protocol.loads(JobState, text)
