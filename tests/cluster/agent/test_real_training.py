"""The agent with real torchrun and real ms-swift on CPU, in the training environment that the project builds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from local.envs import PROJECT, env_dir, python_of, torch_extensions_dir
from trainer import jobs, process
from trainer.checkpoints import judge
from trainer.checkpoints.scan import checkpoints
from trainer.protocol import (
    CheckpointsRequest,
    JobSpec,
    JobState,
    Phase,
    StartRequest,
    StartResult,
    StatusRequest,
    StopReason,
    StopRequest,
    Verdict,
)
from trainer.start import start
from trainer.stop import stop

ENV = env_dir("trainer")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not python_of(ENV).exists(), reason="the trainer environment is not built; see local/envs.py"),
]

RANKS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1000):
    dist.all_reduce(torch.ones(1))
    print("step", step, flush=True)
    time.sleep(0.3)
"""

SFT = """
    --model_type qwen2 --template chatml --torch_dtype bfloat16 --use_cpu true --ddp_backend gloo --max_length 128
    --max_steps 4 --save_steps 2 --logging_steps 1 --add_version false --dataloader_num_workers 0
""".split()  # noqa: SIM905 - a command line reads best as one


class Job:
    """One job on a node of its own."""

    def __init__(self, workdir: Path) -> None:
        self.workdir = str(workdir)

    def start(self, argv: list[str], port: int, **more: object) -> None:
        env = {
            "PATH": f"{ENV / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(torch_extensions_dir(ENV)),
            "NNODES": "1",
            "NODE_RANK": "0",
            "NPROC_PER_NODE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        reply = start(StartRequest(self.workdir, JobSpec("job", argv, env, **more)))
        assert reply.result == StartResult.STARTED, reply.error

    @property
    def state(self) -> JobState:
        return jobs.status(StatusRequest(self.workdir, "job")).state

    @property
    def log(self) -> str:
        return Path(self.workdir, "jobs", "job", "log").read_text(errors="replace")

    def ranks(self) -> dict[int, int]:
        """Rank → pid."""
        found = {}
        for identity in process.descendants([self.state.supervisor.pid]):
            for item in process.read_environ(identity.pid):
                if item.startswith(b"RANK="):
                    found[int(item[5:])] = identity.pid
        return found

    def until(self, condition, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.05)

    def wait(self, timeout_s: float) -> JobState:
        self.until(lambda: self.state.phase in Phase.ENDED, timeout_s)
        return self.state


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path / "work")
    yield made
    stop(StopRequest(made.workdir, "job", grace_s=0, wait_s=20))
    assert not process.marked(made.workdir)


@pytest.fixture
def gang(job, tmp_path, free_port):
    """Two ranks under torchrun, past their third step."""
    (tmp_path / "ranks.py").write_text(RANKS)
    torchrun = [str(ENV / "bin" / "torchrun"), "--nproc_per_node=2", f"--master_port={free_port}"]
    job.start([*torchrun, str(tmp_path / "ranks.py")], free_port)
    job.until(lambda: "step 3" in job.log, 60)
    time.sleep(1.0)  # the ranks are known
    return job


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_killed_rank_ends_the_job_and_is_named(gang):
    pid = gang.ranks()[1]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    state = gang.wait(10)
    assert time.monotonic() - began < 5
    assert (state.phase, state.exit_code, state.error) == (Phase.EXITED, 1, f"rank 1 (pid {pid}) died: SIGKILL")


def test_a_rank_that_hangs_while_another_died_does_not_hold_the_job(gang):
    ranks = gang.ranks()
    os.kill(ranks[0], signal.SIGSTOP)
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    state = gang.wait(15)
    assert time.monotonic() - began < 6
    assert (state.phase, state.stop_reason) == (Phase.KILLED, StopReason.RANK_FAILED)
    assert state.error == f"rank 1 (pid {ranks[1]}) died: SIGKILL"


def test_torchrun_is_stopped_gently(gang):
    reply = stop(StopRequest(gang.workdir, "job", wait_s=30))
    assert reply.stopped
    assert reply.state.killed == 0


@pytest.mark.parametrize(
    ("options", "form", "verdict"),
    [
        (["--tuner_type", "full", "--deepspeed", "zero2"], "full+deepspeed", Verdict.COMPLETE),
        (["--tuner_type", "lora"], "adapter+ddp", Verdict.COMPLETE),
        (["--tuner_type", "full", "--save_only_model", "true"], "full", Verdict.WEIGHTS_ONLY),
    ],
    ids=["zero2", "lora", "weights"],
)
def test_the_judge_agrees_with_ms_swift(job, tmp_path, free_port, options, form, verdict):
    inputs, output = tmp_path / "inputs", tmp_path / "out"
    make = [str(python_of(ENV)), "-m", "local.tiny_model", str(inputs)]
    subprocess.run(make, check=True, cwd=PROJECT, stdout=subprocess.DEVNULL)
    command = [str(ENV / "bin" / "swift"), "sft", *SFT, "--output_dir", str(output), *options]
    command += ["--model", str(inputs / "model"), "--dataset", str(inputs / "sums.jsonl")]
    job.start(command, free_port, output_dir=str(output))
    state = job.wait(280)
    assert (state.phase, state.exit_code) == (Phase.EXITED, 0), job.log[-3000:]
    judged = [judge(listing) for listing in checkpoints(CheckpointsRequest(str(output))).checkpoints]
    assert [(item.step, item.format, item.verdict, item.world_size) for item in judged] == [
        (2, form, verdict, 2),
        (4, form, verdict, 2),
    ]
    assert (state.progress.step, state.progress.max_steps) == (4, 4)
    complete = ["checkpoint-2", "checkpoint-4"] if verdict == Verdict.COMPLETE else []
    assert state.checkpoints == complete
