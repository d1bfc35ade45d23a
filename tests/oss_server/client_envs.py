"""Environments of the foreign clients: made once per lock file, kept in the user's cache."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

_LOCK = Path(__file__).parents[2] / "requirements" / "oss-clients.txt"
_PACKAGE = Path(__file__).parent / "clients" / "package.json"
_INSTALL_TIMEOUT = 280  # seconds


class InstallError(Exception):
    """An environment could not be made here; the message says why."""


def python_environment() -> Path:
    """Return the Python of an environment with ``requirements/oss-clients.txt``.

    Raises:
        InstallError: without a package index to be reached.
    """
    return _environment(_LOCK.read_bytes() + sys.version.encode(), _install_python) / "bin" / "python"


def node_environment() -> Path:
    """Return a folder with the packages of ``clients/package.json`` in ``node_modules``.

    Raises:
        InstallError: without Node, npm or a registry to be reached.
    """
    for tool in ("node", "npm"):
        if not shutil.which(tool):
            raise InstallError(f"{tool} is not installed")
    return _environment(_PACKAGE.read_bytes(), _install_node)


def _environment(lock: bytes, install: Callable[[Path], None]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swift-airflow"
    folder = cache / f"oss-clients-{hashlib.sha256(lock).hexdigest()[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{folder.name}.lock").open("w") as waiting:
        fcntl.flock(waiting, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
            try:
                install(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _install_python(folder: Path) -> None:
    venv.create(folder, with_pip=True)
    # pip is called as a module: the scripts name the folder's first path.
    python = str(folder / "bin" / "python")
    _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(_LOCK)], folder)


def _install_node(folder: Path) -> None:
    shutil.copy(_PACKAGE, folder)
    _run(["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error"], folder)


def _run(argv: list[str], folder: Path) -> None:
    try:
        subprocess.run(argv, cwd=folder, check=True, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no output").splitlines()[-1]
        raise InstallError(f"{argv[0]} failed: {last}") from error
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{argv[0]} took more than {_INSTALL_TIMEOUT} s") from error
