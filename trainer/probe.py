"""The ``probe`` verb: facts of a node, without verdicts. The control side compares nodes and says what to mend."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from typing import Dict, List, Optional, Tuple

from trainer.files import open_lock, try_lock
from trainer.lease import holders
from trainer.paths import NodePaths
from trainer.process import boot_id
from trainer.protocol import Gpu, ProbeReply, ProbeRequest

_MIB = 1 << 20
_QUERY = "--query-gpu=index,name,memory.total,memory.used"


def probe(request: ProbeRequest) -> ProbeReply:
    """Everything that can be known in about a second.

    Raises:
        PathError: the work folder's path is refused.
    """
    node = NodePaths(request.workdir)
    gpus, gpu_error = read_gpus()
    workdir_error = _make_and_use(node)
    memory = read_memory()
    disk_free, disk_total = _disk(node.workdir)
    found = holders(node)
    shared_free = _disk(request.shared_dir)[0] if request.shared_dir else None
    return ProbeReply(
        hostname=platform.node(),
        python_version=platform.python_version(),
        python_path=sys.executable,
        packages={name: _version(name) for name in request.packages},
        gpus=gpus,
        gpu_error=gpu_error,
        workdir_error=workdir_error,
        shared_dir_error=use_folder(request.shared_dir) if request.shared_dir else None,
        disk_free=disk_free,
        disk_total=disk_total,
        shared_disk_free=shared_free,
        memory_total=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        shm_free=_disk("/dev/shm")[0],  # noqa: S108 - the kernel's own, not a temporary file
        cpu_count=len(os.sched_getaffinity(0)),
        boot_id=boot_id(),
        clock=time.time(),
        holder=next(iter(found), None),
        holders=found,
    )


def read_gpus() -> Tuple[List[Gpu], Optional[str]]:
    """The accelerators as ``nvidia-smi`` lists them, and why it could not."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "nvidia-smi was not found"
    command = [program, _QUERY, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {error}"
    if done.returncode != 0:
        return [], f"nvidia-smi: {(done.stderr or done.stdout).strip()[:500]} (exit code {done.returncode})"
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> Tuple[List[Gpu], Optional[str]]:
    """The lines of ``nvidia-smi``'s CSV; a line that cannot be read is the error."""
    gpus = []
    for line in filter(None, map(str.strip, text.splitlines())):
        try:
            index, name, total, used = [part.strip() for part in line.split(",")]
            gpus.append(Gpu(int(index), name, int(total) * _MIB, int(used) * _MIB))
        except ValueError:
            return gpus, f"nvidia-smi: cannot read {line[:200]!r}"
    return gpus, None


def read_memory() -> Dict[str, int]:
    """``/proc/meminfo`` in bytes."""
    found = {}
    with open("/proc/meminfo", encoding="ascii") as stream:
        for line in stream:
            name, _, rest = line.partition(":")
            with contextlib.suppress(ValueError, IndexError):
                found[name] = int(rest.split()[0]) * 1024
    return found


def _version(package: str) -> Optional[str]:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _disk(path: str) -> Tuple[Optional[int], Optional[int]]:
    try:
        usage = os.statvfs(path)
    except OSError:
        return None, None
    return usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize


def _make_and_use(node: NodePaths) -> Optional[str]:
    try:
        node.create()
    except OSError as error:
        return str(error)
    return use_folder(node.locks)


def use_folder(path: str) -> Optional[str]:
    """Whether files can be written and locked in a folder: ``None``, or why not."""
    probe_file = os.path.join(path, f".probe-{os.getpid()}")
    try:
        descriptor = open_lock(probe_file)
        try:
            os.write(descriptor, b"x" * 4096)
            try_lock(descriptor)
        finally:
            os.close(descriptor)
            os.unlink(probe_file)
    except OSError as error:
        return str(error)
    return None
