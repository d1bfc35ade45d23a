"""A finished training of two nodes that share no disk, with its bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from local.oss_server.serving import RunningServer, running_server
from swift_provider.operators.backup import BackupOperator
from swift_provider.operators.prune import PruneOperator
from swift_provider.planning.plan import LaunchPlan
from tests.cluster.sites import Site
from tests.unit.trainer import layouts
from trainer.protocol import Manifest, OssCredentials, OssTarget
from trainer.store import list_manifests, open_bucket

NODES = ("node1", "node2")
SECRET = "local-secret"
FACTS = {"packages": {"node1": {"torch": "2.0", "ms-swift": "4.6.0"}}}


@dataclass
class Run:
    """A finished training of two nodes and its bucket."""

    site: Site
    server: RunningServer
    plan: LaunchPlan

    def save(self, step: int) -> dict[str, bytes]:
        """A ZeRO-3 checkpoint of two ranks: what is rank 1's lies on node2, everything else on node1."""
        config = {"deepspeed": {"zero_optimization": {"stage": 3}}}
        files = {**layouts.common(step, config), **layouts.FULL, **layouts.deepspeed(step, 3)}
        content = {name: text.encode() if isinstance(text, str) else text for name, text in files.items()}
        content["model.safetensors"] = layouts.safetensors(300_000)
        for node, part in zip(NODES, split(content), strict=True):
            layouts.write(self.folder(node) / f"checkpoint-{step}", part)
        return content

    def folder(self, node: str) -> Path:
        return Path(next(item.output_dir for item in self.plan.nodes if item.name == node))

    def backup(self, **changes: Any) -> Any:
        plan = self.plan.model_copy(update=changes)
        return BackupOperator(task_id="backup", plan=plan.model_dump(mode="json"), facts=FACTS).execute({})

    def prune(self, **changes: Any) -> Any:
        plan = self.plan.model_copy(update=changes)
        return PruneOperator(task_id="prune", plan=plan.model_dump(mode="json")).execute({})

    @property
    def target(self) -> OssTarget:
        credentials = OssCredentials("local", SECRET)
        return OssTarget(self.server.endpoint, "cn-hangzhou", "bucket", "ckpt/dag/run", credentials)

    def manifests(self) -> dict[str, Manifest]:
        return {manifest.name: manifest for manifest in list_manifests(self.target)}

    def objects(self) -> dict[str, bytes]:
        """Everything in the folders of the run's checkpoints."""
        bucket = open_bucket(self.target)
        prefix = f"{self.target.prefix}/checkpoint-"
        keys = [item.key for item in bucket.list_objects_v2(prefix=prefix, max_keys=1000).object_list]
        return {key.removeprefix(f"{self.target.prefix}/"): bucket.get_object(key).read() for key in keys}

    def on_disk(self, node: str) -> set[str]:
        return {path.name for path in self.folder(node).glob("checkpoint-*")}


def split(files: dict[str, bytes]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    second = {name: data for name, data in files.items() if "rank_1" in name or name == "rng_state_1.pth"}
    # save_on_each_node: what is common is there twice
    both = {name: data for name, data in files.items() if name in ("args.json", "trainer_state.json", "latest")}
    return {name: data for name, data in files.items() if name not in second}, {**second, **both}


@pytest.fixture
def run(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    with running_server(tmp_path / "oss", {"local": SECRET}, buckets=["bucket"]) as server:
        extra = {"access_key_id": "local", "access_key_secret": SECRET, "region": "cn-hangzhou"}
        connection = {"conn_type": "oss", "extra": {**extra, "endpoint": server.endpoint}}
        monkeypatch.setenv("AIRFLOW_CONN_OSS_DEFAULT", json.dumps(connection))
        policy = {"backup": "oss://bucket/ckpt", "keep_last": 1, "keep_best": {"metric": "eval_loss", "mode": "min"}}
        yield Run(site, server, site.plan(checkpoints=policy))
