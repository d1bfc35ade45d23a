"""Starting the training process of a job: command, environment, log."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Dict, List

from trainer.files import PRIVATE_FILE, try_lock
from trainer.paths import JobPaths, NodePaths
from trainer.process import marker
from trainer.protocol import MARKER, JobSpec

_PLACEHOLDER = "{job_dir}"


def command_of(job: JobPaths, spec: JobSpec) -> List[str]:
    """The argv of the training, with ``{job_dir}`` filled in."""
    return [item.replace(_PLACEHOLDER, job.folder) for item in spec.argv]


def environment_of(node: NodePaths, job: JobPaths, spec: JobSpec) -> Dict[str, str]:
    """The environment of the training: this node's, the spec's over it, and the marker over both."""
    own = {name: value.replace(_PLACEHOLDER, job.folder) for name, value in spec.env.items()}
    return {**os.environ, **own, MARKER: marker(node.workdir, spec.job_id)}


def launch(node: NodePaths, job: JobPaths, spec: JobSpec) -> int:
    """Start the training in a session of its own, with its output appended to the job's log; returns its pid.

    The flock of the log belongs to the open file that the training inherits: it is held while any process of the
    training has the log open, and by none of ours.

    Raises:
        OSError: the command, the interpreter or the folder does not exist or may not be used.
    """
    if not spec.argv:
        raise ValueError("the job's argv is empty")
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
