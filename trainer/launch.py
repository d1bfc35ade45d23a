"""Starting the training process of a job: command, environment, log."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import Dict, List, Sequence

from trainer.files import PRIVATE_FILE, try_lock
from trainer.paths import JobPaths, NodePaths
from trainer.process import marker
from trainer.protocol import MARKER, JobSpec

_PLACEHOLDER = "{job_dir}"
_GPUS = "CUDA_VISIBLE_DEVICES"


def refuse_nonsense(spec: JobSpec) -> None:
    """Look at what can be judged from the spec alone.

    Raises:
        ValueError: the spec contradicts itself; the message says where.
    """
    if not spec.argv:
        raise ValueError("the job's argv is empty")
    if spec.port is not None and not 0 < spec.port < 65536:
        raise ValueError(f"port {spec.port} is refused: it must be from 1 to 65535")
    if spec.gpus is None:
        return
    if not spec.gpus or min(spec.gpus) < 0 or len(set(spec.gpus)) < len(spec.gpus):
        raise ValueError(f"gpus {spec.gpus} is refused: name each GPU once, by its index, or leave it out")
    if spec.env.get(_GPUS, _visible(spec.gpus)) != _visible(spec.gpus):
        raise ValueError(f"the job leases gpus {spec.gpus}, but its environment says {_GPUS}={spec.env[_GPUS]}")


def _visible(gpus: Sequence[int]) -> str:
    return ",".join(map(str, gpus))


def command_of(job: JobPaths, spec: JobSpec) -> List[str]:
    """The argv of the training, with ``{job_dir}`` filled in."""
    return [item.replace(_PLACEHOLDER, job.folder) for item in spec.argv]


def environment_of(node: NodePaths, job: JobPaths, spec: JobSpec) -> Dict[str, str]:
    """The environment of the training: this node's, the spec's over it, and its GPUs and the marker over both."""
    own = {name: value.replace(_PLACEHOLDER, job.folder) for name, value in spec.env.items()}
    if spec.gpus is not None:
        own = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **own, _GPUS: _visible(spec.gpus)}  # indexes as nvidia-smi counts
    return {**os.environ, **own, MARKER: marker(node.workdir, spec.job_id)}


def prove_launchable(node: NodePaths, job: JobPaths, spec: JobSpec) -> None:
    """Find the program and the folder, so that a prepared job is known to start.

    Raises:
        OSError: one of them is missing or may not be used.
    """
    folder = spec.cwd or job.folder
    if not os.path.isdir(folder):
        raise NotADirectoryError(f"the job's folder {folder} is no folder")
    program = command_of(job, spec)[0]
    path = environment_of(node, job, spec).get("PATH", os.defpath)
    if shutil.which(os.path.join(folder, program) if os.path.dirname(program) else program, path=path) is None:
        raise FileNotFoundError(f"the program {program} was not found, or may not be run")


def launch(node: NodePaths, job: JobPaths, spec: JobSpec) -> int:
    """Start the training in a session of its own, with its output appended to the job's log; returns its pid.

    The flock of the log belongs to the open file that the training inherits: it is held while any process of the
    training has the log open, and by none of ours.

    Raises:
        OSError: the command, the interpreter or the folder does not exist or may not be used.
    """
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        for _ in range(100):  # a reader holds the lock for an instant when it asks whether it is held
            if try_lock(log):
                break
            time.sleep(0.02)
        child = subprocess.Popen(
            command_of(job, spec),
            cwd=spec.cwd or job.folder,
            env=environment_of(node, job, spec),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        os.close(log)
    child.returncode = 0  # the supervisor collects it by waitpid(-1); Popen must not warn
    return child.pid
