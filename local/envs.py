"""Builds the two pinned environments, Airflow's and the trainer's, and tells where they are.

They cannot be one: ms-swift and Airflow need different versions of FastAPI. Both live in the user's cache folder,
named by the hash of their lock, so that a second clone on the same machine reuses them. Runs on any Python ≥ 3.11
with the standard library alone, because it is what runs before anything is installed.

    python3 -m local.envs airflow     # build if needed, print the folder
    python3 -m local.envs trainer
    python3 -m local.envs overlay     # this clone's .build/venv: the Airflow environment plus this project, editable
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
LOCKS = {"airflow": "dev.txt", "trainer": "trainer.txt"}
#: Grows when the way an environment is built changes, so that older ones are not mistaken for new ones.
RECIPE_VERSION = "1"


class EnvironmentBuildError(RuntimeError):
    """An environment could not be built; the message ends with the last lines of the installer."""


def say(text: str) -> None:
    """Progress goes to stderr, since stdout is the answer."""
    print(text, file=sys.stderr, flush=True)


def cache_dir() -> Path:
    """Where everything lives that clones of this project share on one machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swift-airflow"


def lock_hash(name: str) -> str:
    """What an environment is named by: its lock, the Python version, and how it is built."""
    lock = (PROJECT / "requirements" / LOCKS[name]).read_bytes()
    seed = f"{RECIPE_VERSION} {sys.version_info[:2]} ".encode() + lock
    return hashlib.sha256(seed).hexdigest()[:12]


def env_dir(name: str) -> Path:
    """The folder of environment ``name`` (``airflow`` or ``trainer``), built or not."""
    return cache_dir() / "envs" / f"{name}-{lock_hash(name)}"


def python_of(folder: Path) -> Path:
    """The interpreter of an environment folder."""
    return folder / "bin" / "python"


def ensure(name: str) -> Path:
    """Builds environment ``name`` unless it is there; two builders at once wait for each other.

    Raises:
        EnvironmentBuildError: the installer failed.
    """
    folder = env_dir(name)
    if (folder / ".complete").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".complete").exists():
            say(f"building the {name} environment in {folder} (once; minutes)")
            started = time.monotonic()
            shutil.rmtree(folder, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(folder)], folder)
            {"airflow": _fill_airflow, "trainer": _fill_trainer}[name](folder)
            (folder / ".complete").touch()
            say(f"{name} environment ready after {time.monotonic() - started:.0f} s")
    return folder


def _fill_airflow(folder: Path) -> None:
    lock = str(PROJECT / "requirements" / "dev.txt")
    pip = [str(python_of(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "uv==0.13.9"], folder)
    _run(
        [str(folder / "bin" / "uv"), "pip", "install", "--python", str(python_of(folder)), "--no-deps", "-r", lock],
        folder,
    )


def _fill_trainer(folder: Path) -> None:
    lock = PROJECT / "requirements" / "trainer.txt"
    pip = [str(python_of(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = next(line for line in lock.read_text().splitlines() if line.startswith("torch=="))
    # With its dependencies: a build for GPUs brings libraries that this lock, made on a machine without one, omits.
    _run([*pip, torch, "-c", str(lock)], folder)
    _run([*pip, "--no-deps", "-r", str(lock)], folder)
    prebuild_ops(folder)


def torch_extensions_dir(folder: Path) -> Path:
    """Where DeepSpeed's compiled operators of a trainer environment are kept."""
    return folder / "torch_extensions"


def prebuild_ops(folder: Path) -> None:
    """Compiles DeepSpeed's CPU communication operator once, which otherwise delays the first training by minutes."""
    if shutil.which("c++") is None:
        say("no C++ compiler: DeepSpeed's CPU operator is not built, trainings on this machine use torch's instead")
        return
    code = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()"
    env = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(torch_extensions_dir(folder)),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",  # for ninja
    }
    _run([str(python_of(folder)), "-c", code], folder, env)


def ensure_overlay() -> Path:
    """This clone's own thin environment over the shared one, with the project installed in editable form.

    The shared environment must not know any clone, yet Airflow finds a provider by the entry point of an installed
    distribution.
    """
    base = ensure("airflow")
    link = PROJECT / ".build" / "venv"
    stamp = hashlib.sha256(f"{RECIPE_VERSION} {base} {PROJECT}".encode() + (PROJECT / "pyproject.toml").read_bytes())
    folder = PROJECT / ".build" / f"venv-{stamp.hexdigest()[:12]}"
    marker = folder / ".complete"
    if marker.exists():
        _point(link, folder)
        return link
    shutil.rmtree(folder, ignore_errors=True)
    _run([str(python_of(base)), "-m", "venv", "--without-pip", str(folder)], folder)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    base_site = next((base / "lib").glob("python*")) / "site-packages"
    (site / "_shared_environment.pth").write_text(f"import site; site.addsitedir({str(base_site)!r})\n")
    pip = [str(python_of(base)), "-m", "pip", "--python", str(python_of(folder))]
    _run([*pip, "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", str(PROJECT)], folder)
    for script in (base / "bin").iterdir():
        _copy_script(script, folder / "bin" / script.name, base, folder)
    marker.touch()
    _point(link, folder)
    return link


def _point(link: Path, folder: Path) -> None:
    """Makes ``link`` lead to ``folder``, at once: what still runs from an older one keeps it."""
    if link.is_symlink() and link.resolve() == folder:
        return
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    temporary = link.with_name(f"{link.name}.{os.getpid()}")
    temporary.symlink_to(folder.name)
    temporary.replace(link)


def _copy_script(source: Path, target: Path, base: Path, folder: Path) -> None:
    """A command of the shared environment in the overlay: scripts run the overlay's Python, programs are linked."""
    if target.exists() or not source.is_file() or source.is_symlink() or not os.access(source, os.X_OK):
        return
    content = source.read_bytes()
    shebang = f"#!{python_of(base)}".encode()
    if content.startswith(shebang):
        target.write_bytes(b"#!" + str(python_of(folder)).encode() + content[len(shebang) :])
        target.chmod(0o755)
    elif content.startswith(b"\x7fELF"):
        target.symlink_to(source)


def _run(command: list[str], folder: Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=False)
    if done.returncode:
        tail = "\n".join(done.stdout.strip().splitlines()[-30:])
        raise EnvironmentBuildError(
            f"{' '.join(command)}\nexit status {done.returncode} while building {folder}:\n{tail}"
        )


def main() -> int:
    """Entry point of ``python3 -m local.envs``."""
    if sys.version_info < (3, 11):  # noqa: UP036 - it is what tells a user of an older Python
        say(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: run with PYTHON=python3.11 or newer")
        return 2
    builders = {"airflow": lambda: ensure("airflow"), "trainer": lambda: ensure("trainer"), "overlay": ensure_overlay}
    wanted = sys.argv[1:]
    if not wanted or any(name not in builders for name in wanted):
        say(f"usage: python3 -m local.envs {'|'.join(builders)} …")
        return 2
    try:
        for name in wanted:
            print(builders[name]())
    except EnvironmentBuildError as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
