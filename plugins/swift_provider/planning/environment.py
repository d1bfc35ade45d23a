"""How a training's command line reaches its environment on a node: bare, behind an activation script, in a container.

Everything here is a list of arguments. No value is ever part of a shell's text.
"""

from __future__ import annotations

from collections.abc import Iterable

from swift_provider.config.docker import Docker
from trainer.protocol import MARKER

#: Sources a script with its own arguments, and not with ours, then becomes the training. ``$1`` counts the words of
#: the script's call, the rest is the command.
ACTIVATE = (
    '_swift_n=$1; shift; _swift_s=("${@:1:_swift_n}"); shift "$_swift_n"; _swift_c=("$@"); '
    'set -- "${_swift_s[@]:1}"; source "${_swift_s[0]}" && exec "${_swift_c[@]}"'
)
#: What the agent sets beside the job's own variables.
AGENT_VARIABLES = (MARKER,)
GPU_VARIABLES = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES")


def activated(argv: list[str], activate: list[str]) -> list[str]:
    """``argv`` behind the script ``activate``; itself where there is none."""
    return ["bash", "-c", ACTIVATE, "bash", str(len(activate)), *activate, *argv] if activate else argv


def contained(
    argv: list[str],
    docker: Docker,
    *,
    name: str,
    workdir: str,
    folders: Iterable[str],
    inputs: Iterable[str],
    variables: Iterable[str],
    device: str,
) -> list[str]:
    """``argv`` in a container.

    Values of variables never stand in the command line: ``--env NAME`` takes them from the job's environment.

    Args:
        argv: the command inside.
        docker: the container.
        name: of the container.
        workdir: the folder to start in; the same path inside and outside.
        folders: mounted at the same path.
        inputs: paths that the training reads; mounted read only where no other mount holds them.
        variables: names of the environment variables to hand in.
        device: ``gpu`` or ``cpu``.
    """
    binds = {target: (source, read_only) for source, target, read_only in docker.binds()}
    for folder in folders:
        binds.setdefault(folder, (folder, False))
    for path in inputs:
        if path.startswith("/") and not any(path == target or _below(path, target) for target in binds):
            binds[path] = (path, True)
    command = [docker.program, "run", "--rm", "--init", "--sig-proxy=true", "--name", name, "--network", "host"]
    command += ["--shm-size", docker.shm_size] if docker.shm_size else ["--ipc", "host"]
    command += ["--gpus", "all"] if device == "gpu" else []
    limits = {"memlock": "-1", "stack": "67108864", **docker.ulimits}
    for limit, value in limits.items():
        command += ["--ulimit", f"{limit}={value}"]
    for path in docker.devices:
        command += ["--device", path]
    for target, (source, read_only) in binds.items():
        command += ["--volume", f"{source}:{target}:ro" if read_only else f"{source}:{target}"]
    for variable in sorted({*variables, *AGENT_VARIABLES}):
        command += ["--env", variable]
    command += ["--user", docker.user] if docker.user else []
    return [*command, "--workdir", workdir, "--entrypoint", argv[0], docker.image, *argv[1:]]


def _below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")
