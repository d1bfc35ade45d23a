"""One laptop for all end-to-end tests: real Airflow, real sshd nodes, real ms-swift, a real OSS protocol server."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from local.airflow import AirflowClient
from local.laptop import Laptop
from local.processes import descendants_marked
from tests.e2e.engines import write_engine_configs
from tests.e2e.faults import write_configs
from trainer.process import node_key
from trainer.protocol import MARKER

ENDED = {"success", "failed"}


@pytest.fixture(scope="session")
def laptop() -> Iterator[Laptop]:
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="swift-e2e-", ignore_cleanup_errors=True) as folder,
    ):
        configs = write_configs(Path(folder))
        write_engine_configs(Path(folder), configs)
        laptop = Laptop(Path(folder), config_dir=configs)
        patch.setenv("SWIFT_RETRY_DELAY_S", "4")
        try:
            laptop.start_servers()
            laptop.put_inputs()
            laptop.start_airflow()
            yield laptop
        finally:
            keep_logs(laptop)
            laptop.stop()


def keep_logs(laptop: Laptop) -> None:
    """Where ``SWIFT_E2E_LOGS`` names a folder, the logs of everything stay there."""
    wanted = os.environ.get("SWIFT_E2E_LOGS")
    if wanted:
        import shutil

        for source in [*laptop.folder.glob("airflow/*.out"), *laptop.folder.glob("nodes/*/*/jobs/*/log")]:
            target = Path(wanted) / str(source.relative_to(laptop.folder)).replace("/", "-")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        shutil.copytree(laptop.folder / "airflow" / "logs", Path(wanted) / "airflow-logs", dirs_exist_ok=True)


@pytest.fixture(scope="session")
def client(laptop: Laptop) -> AirflowClient:
    assert laptop.airflow is not None
    client = laptop.airflow.client()
    client.wait_for_dag("swift_train")
    return client


@pytest.fixture(scope="session")
def run_to_end(client: AirflowClient) -> Callable[..., str]:
    """Triggers a run of swift_train and waits for its end; returns its state."""

    def run(run_id: str, timeout: float = 400, **conf: Any) -> str:
        client.trigger("swift_train", run_id, {"recipe": "tiny-cpu", **conf})
        return wait_for(lambda: client.run_state("swift_train", run_id), lambda state: state in ENDED, timeout)

    return run


def wait_for(look: Callable[[], Any], done: Callable[[Any], bool], timeout: float) -> Any:
    """The first value of ``look`` for which ``done`` holds.

    Raises:
        TimeoutError: none within ``timeout`` seconds; the message holds the last value.
    """
    limit = time.monotonic() + timeout
    while True:
        value = look()
        if done(value):
            return value
        if time.monotonic() > limit:
            raise TimeoutError(f"still {value!r} after {timeout:g} s")
        time.sleep(1)


def training_processes(laptop: Laptop) -> list[int]:
    """Every process of a job on the laptop's nodes, from /proc and not from anybody's own state."""
    keys = [node_key(str(node.workdir)) for node in laptop.nodes]
    return [pid for key in keys for pid in descendants_marked(MARKER, f"{key}/")]
