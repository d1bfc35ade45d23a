"""One server for all tests here, a fresh bucket for each."""

from collections.abc import Iterator
from pathlib import Path

import oss2
import pytest

from local.oss_server import RunningServer, running_server
from tests.oss_server.harness import ADMIN_TOKEN, KEY_ID, REGION, SECRET, new_bucket


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root: Path = tmp_path_factory.mktemp("oss")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_PROXY", "no_proxy"):  # clients would send loopback requests to a proxy, too
            patch.setenv(name, "127.0.0.1,localhost")
        with running_server(root, {KEY_ID: SECRET}, region=REGION, admin_token=ADMIN_TOKEN) as running:
            yield running


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    yield shared_server
    shared_server.faults.clear()


@pytest.fixture(params=["v1", "v4"])
def bucket(request: pytest.FixtureRequest, server: RunningServer) -> oss2.Bucket:
    """A new bucket, for each signature version."""
    return new_bucket(server, request.param)


@pytest.fixture
def v4_bucket(server: RunningServer) -> oss2.Bucket:
    return new_bucket(server)
