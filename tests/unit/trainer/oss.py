"""A server that speaks the OSS protocol, for the tests of a module, and a place of its own in it for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from local.oss_server.serving import RunningServer, running_server
from trainer.protocol import OssCredentials, OssTarget
from trainer.store import client

KEY_ID, SECRET, REGION, BUCKET = "LTAI-test-key", "very-secret-key", "cn-hangzhou", "checkpoints"


def prefix_of(request: pytest.FixtureRequest) -> str:
    """A prefix that no other test of the module has."""
    return "".join(letter if letter.isalnum() else "-" for letter in request.node.name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Signatures are checked; parts may be of any size."""
    root = tmp_path_factory.mktemp("oss")
    with running_server(root, {KEY_ID: SECRET}, buckets=[BUCKET], region=REGION, min_part_size=1) as running:
        yield running


@pytest.fixture
def place(
    server: RunningServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OssTarget]:
    """A checkpoint's place, no faults before or after, and no long waits between tries."""
    server.faults.clear()
    monkeypatch.setattr(client.random, "uniform", lambda _low, _high: 0.01)
    target = f"{prefix_of(request)}/checkpoint-8"
    yield OssTarget(server.endpoint, REGION, BUCKET, target, OssCredentials(KEY_ID, SECRET))
    server.faults.clear()
