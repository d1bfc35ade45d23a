"""After a real run, a restore and housekeeping: the bucket's secret key is in nothing that anybody wrote or started."""

from __future__ import annotations

import base64
import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from local.airflow import AirflowClient
from local.laptop import Laptop
from local.processes import descendants_marked
from tests.conftest import ENDED, wait_for
from trainer.process import node_key
from trainer.protocol import MARKER


def spellings(secret: str) -> list[bytes]:
    """The secret as it is, and the part of its base64 that does not depend on what stands before it."""
    data = secret.encode()
    return [data, *(base64.b64encode(b"x" * shift + data)[4:-4] for shift in range(3))]


@contextlib.contextmanager
def watched(laptop: Laptop, needles: list[bytes]) -> Iterator[set[str]]:
    """Looks at the command lines of all processes, and at the environment of those of jobs, all the time."""
    found: set[str] = set()
    over = threading.Event()
    keys = [node_key(str(node.workdir)) for node in laptop.nodes]

    def look() -> None:
        while not over.wait(0.1):
            jobs = {pid for key in keys for pid in descendants_marked(MARKER, f"{key}/")}
            for folder in Path("/proc").glob("[0-9]*"):
                names = ["cmdline", "environ"] if int(folder.name) in jobs else ["cmdline"]
                for name in names:
                    with contextlib.suppress(OSError):
                        if any(needle in (folder / name).read_bytes() for needle in needles):
                            found.add(f"{name} of {(folder / 'cmdline').read_bytes()[:80]!r}")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def end_of(client: AirflowClient, dag: str, run: str, **conf: object) -> str:
    client.wait_for_dag(dag)
    client.trigger(dag, run, conf)
    return str(wait_for(lambda: client.run_state(dag, run), lambda state: state in ENDED, 200))


def test_the_secret_key_is_nowhere(laptop: Laptop, client: AirflowClient, run_to_end: Callable[..., str]) -> None:
    needles = spellings(laptop.settings["oss_key_secret"])
    with watched(laptop, needles) as seen:
        assert run_to_end("e2e-secrets", max_steps=6, save_steps=3) == "success"
        assert end_of(client, "swift_restore", "e2e-restore", recipe="tiny-cpu", checkpoint="latest") == "success"
        assert end_of(client, "swift_housekeeping", "e2e-clean", leftovers="delete") == "success"
    assert not seen
    # Where the laptop itself keeps what it drew; it is no part of the product.
    own = {laptop.folder / "settings.json"}
    files = [path for path in laptop.folder.rglob("*") if path.is_file() and not path.is_symlink() and path not in own]
    assert {"airflow.db", "state.json", "spec.json", "manifest.json"} & {path.name for path in files}
    assert [str(path) for path in files if any(needle in path.read_bytes() for needle in needles)] == []


def test_a_restored_checkpoint_is_on_the_shared_disk(laptop: Laptop, client: AirflowClient) -> None:
    answer = client.xcom("swift_restore", "e2e-restore", "restore")
    [folder] = {Path(path) for path in answer["paths"].values()}
    assert folder.is_relative_to(laptop.folder / "shared" / "restored")
    assert answer["checkpoint"].endswith(folder.name)
    assert (folder / "model.safetensors").stat().st_size > 100_000


def test_the_command_line_gets_the_keys_from_airflow(laptop: Laptop, tmp_path: Path) -> None:
    assert laptop.airflow is not None

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(laptop.airflow.venv / "bin" / "swift-provider"), "checkpoints", *words]
        return subprocess.run(
            command, env=laptop.airflow.environment(), cwd=tmp_path, capture_output=True, text=True, check=False
        )

    verified = run("verify", "tiny-cpu", "latest", "--deep")
    assert (verified.returncode, verified.stderr) == (0, "")
    assert "every byte read" in verified.stdout
    restored = run("restore", "tiny-cpu", "latest", "--to", str(tmp_path))
    assert restored.returncode == 0, restored.stderr
    assert list(tmp_path.glob("checkpoint-*/model.safetensors"))
    assert laptop.settings["oss_key_secret"] not in verified.stdout + restored.stdout + restored.stderr
