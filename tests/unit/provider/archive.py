"""A bucket with the checkpoints of several runs, as the backup task leaves them; on a server that checks signatures."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from local.oss_server.serving import RunningServer
from tests.unit.trainer.oss import BUCKET, KEY_ID, REGION, SECRET
from trainer import store
from trainer.protocol import Manifest, OssCredentials, OssTarget, StoredFile
from trainer.store import crc64_of


@dataclass
class Archive:
    """Where the checkpoints are, as the keeper of the bucket sees them."""

    server: RunningServer
    target: OssTarget
    folder: Path

    @classmethod
    def at(cls, server: RunningServer, prefix: str, folder: Path) -> Archive:
        """An empty one below ``prefix``."""
        target = OssTarget(server.endpoint, REGION, BUCKET, prefix, OssCredentials(KEY_ID, SECRET))
        return cls(server, target, folder)

    @property
    def url(self) -> str:
        return self.target.url

    def place(self, path: str) -> OssTarget:
        return dataclasses.replace(self.target, prefix=f"{self.target.prefix}/{path}")

    def save(self, run: str, step: int, *, day: int = 1, manifest: bool = True, **more: object) -> Manifest:
        """A checkpoint of two files; without ``manifest`` its upload was broken off."""
        place, files = self.place(f"dag/{run}/checkpoint-{step}"), []
        for name, data in {"model.safetensors": f"{run} {step}".encode() * 5000, "deep/state.pt": b"s" * step}.items():
            local = self.folder / run / str(step) / name
            local.parent.mkdir(parents=True, exist_ok=True)
            local.write_bytes(data)
            store.open_bucket(place).put_object(place.key(name), data)
            files.append(StoredFile(name, len(data), crc64_of(str(local)), "node1"))
        made = Manifest(f"checkpoint-{step}", step, "full+ddp", "complete", files, dag_id="dag", run_id=run)
        made = dataclasses.replace(made, created_at=f"2026-11-{day:02}T02:00:00+00:00", recipe="r", **more)  # type: ignore[arg-type]
        if manifest:
            store.write_manifest(place, made)
        return made

    def objects(self) -> set[str]:
        """Every object, below the archive's prefix."""
        found = store.list_objects(store.open_bucket(self.target), self.target.prefix + "/")
        return {item.key[len(self.target.prefix) + 1 :] for item in found}

    def publish(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The connection ``oss_default``, in the environment."""
        extra = {"access_key_id": KEY_ID, "access_key_secret": SECRET, "region": REGION}
        connection = {"conn_type": "oss", "extra": {**extra, "endpoint": self.server.endpoint}}
        monkeypatch.setenv("AIRFLOW_CONN_OSS_DEFAULT", json.dumps(connection))
