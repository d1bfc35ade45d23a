"""Where everything lies: one class names each file below a node's work folder, one each file of a job."""

from __future__ import annotations

import os
import re

from trainer.files import PRIVATE_FOLDER

_JOB_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,159}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


class PathError(ValueError):
    """A name or a path that the agent refuses to use; the message shows it and says why."""


class JobPaths:
    """Every file of one job. The folder exists only after :meth:`create`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.spec = os.path.join(folder, "spec.json")
        self.state = os.path.join(folder, "state.json")
        self.log = os.path.join(folder, "log")
        self.supervisor_log = os.path.join(folder, "supervisor.log")
        self.stop_request = os.path.join(folder, "stop.json")
        self.commit = os.path.join(folder, "commit.json")
        self.processes = os.path.join(folder, "processes.json")
        self.mirror_state = os.path.join(folder, "mirror.json")
        self.mirror_log = os.path.join(folder, "mirror.log")
        self.mirror_lock = os.path.join(folder, "mirror.lock")
        self.mirror_keys = os.path.join(folder, "mirror.keys")

    @property
    def job_id(self) -> str:
        """The id that the folder is named by."""
        return os.path.basename(self.folder)

    def create(self) -> None:
        """Make the job's folder, readable by its owner alone."""
        os.makedirs(self.folder, mode=PRIVATE_FOLDER, exist_ok=True)

    def attachment(self, name: str) -> str:
        """The path of one of the files that a job spec brings along.

        Raises:
            PathError: ``name`` is no plain file name, or it is one of the agent's own.
        """
        path = os.path.join(self.folder, name)
        if not _FILE_NAME.fullmatch(name) or path in vars(self).values():
            raise PathError(f"file name {name!r} of job {self.job_id} is refused: use letters, digits, '.', '_', '-'")
        return path


class NodePaths:
    """Every file below a node's work folder.

    Raises:
        PathError: ``workdir`` is not an absolute path.
    """

    def __init__(self, workdir: str) -> None:
        if not os.path.isabs(workdir) or os.path.realpath(workdir) == "/":
            raise PathError(f"workdir must be an absolute path below /, got {workdir!r}")
        self.workdir = os.path.realpath(workdir)
        self.agent = os.path.join(self.workdir, "agent")
        self.locks = os.path.join(self.workdir, "locks")
        self.cache = os.path.join(self.workdir, "cache")
        self.jobs = os.path.join(self.workdir, "jobs")
        self.runs = os.path.join(self.workdir, "runs")
        self.lease = os.path.join(self.locks, "lease.lock")
        self.start_lock = os.path.join(self.locks, "start.lock")
        self.build_lock = os.path.join(self.locks, "build.lock")
        self.holder = os.path.join(self.locks, "holder.json")
        self.cancelled = os.path.join(self.locks, "cancelled.json")

    def create(self) -> None:
        """Make the work folder and its parts, readable by their owner alone."""
        for folder in (self.workdir, self.agent, self.locks, self.cache, self.jobs, self.runs):
            os.makedirs(folder, mode=PRIVATE_FOLDER, exist_ok=True)

    def gpu_lock(self, index: int) -> str:
        """The lock file of one GPU."""
        return os.path.join(self.locks, f"gpu-{index}.lock")

    def gpu_holder(self, index: int) -> str:
        """The note that says who holds that lock."""
        return os.path.join(self.locks, f"gpu-{index}.json")

    def job(self, job_id: str) -> JobPaths:
        """The files of one job.

        Raises:
            PathError: ``job_id`` cannot name a folder.
        """
        if not _JOB_ID.fullmatch(job_id):
            raise PathError(
                f"job id {job_id[:200]!r} is refused: 1 to 160 of letters, digits, '.', '_', '-', not starting with '.'"
            )
        return JobPaths(os.path.join(self.jobs, job_id))

    def inside(self, *parts: str) -> str:
        """The path of ``parts`` below the work folder, with links and ``..`` resolved.

        Raises:
            PathError: the result lies outside the work folder.
        """
        path = os.path.realpath(os.path.join(self.workdir, *parts))
        if os.path.commonpath([path, self.workdir]) != self.workdir:
            raise PathError(f"{path} lies outside the work folder {self.workdir}")
        return path
