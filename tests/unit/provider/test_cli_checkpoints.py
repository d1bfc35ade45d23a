"""``swift-provider checkpoints`` against a real OSS server: what exists, what is damaged, what comes back."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from local.oss_server.serving import running_server
from swift_provider.cli.connection import parse_connection, target_for
from swift_provider.config import ConfigError
from tests.unit.provider.archive import BUCKET, KEY_ID, REGION, SECRET, Archive
from tests.unit.provider.test_cli import run
from trainer import store
from trainer.store import client


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Path:
    """Where the server keeps its objects."""
    return tmp_path_factory.mktemp("oss")


@pytest.fixture(scope="module")
def server(disk):
    with running_server(disk, {KEY_ID: SECRET}, buckets=[BUCKET], region=REGION, min_part_size=1) as running:
        yield running


@pytest.fixture
def archive(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Archive:
    server.faults.clear()
    monkeypatch.setattr(client.random, "uniform", lambda _low, _high: 0.01)
    made = Archive.at(server, "".join(c if c.isalnum() else "-" for c in request.node.name), tmp_path / "made")
    made.publish(monkeypatch)
    made.save("one", 8, day=1, metrics={"eval_loss": 0.5, "loss": 0.4})
    made.save("one", 16, day=1, metrics={"eval_loss": 0.2, "loss": 0.3})
    made.save("two", 8, day=2, metrics={"eval_loss": 0.9, "loss": 0.8})
    made.save("two", 16, day=2, manifest=False)
    return made


@pytest.fixture
def configs(archive: Archive, tmp_path: Path) -> Path:
    """A recipe ``r`` whose backup is the archive."""
    folder = tmp_path / "configs"
    (folder / "recipes").mkdir(parents=True)
    (folder / "recipes" / "r.yaml").write_text(
        "name: r\ncluster: c\nswift: {args: {model: m/m, dataset: [d/d]}}\n"
        f"checkpoints: {{backup: '{archive.url}', keep_best: {{metric: eval_loss, mode: min}}}}\n"
    )
    return folder


def test_list_shows_only_what_has_a_manifest(archive: Archive, configs: Path) -> None:
    done = run("checkpoints", "list", archive.url)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split()[:4] for line in done.stdout.splitlines()[1:]]
    assert rows == [["one", "checkpoint-8", "24.4", "KiB"], ["one", "checkpoint-16", "29.3", "KiB"],
                    ["two", "checkpoint-8", "24.4", "KiB"]]  # fmt: skip
    assert "0.2000" in done.stdout
    by_recipe = run("checkpoints", "list", "r", "--json", config=configs)
    found = [json.loads(line) for line in by_recipe.stdout.splitlines()]
    assert [(item["run_id"], item["step"], item["pinned"], item["damaged"]) for item in found] == [
        ("one", 8, False, []), ("one", 16, False, []), ("two", 8, False, []),
    ]  # fmt: skip
    assert found[0]["url"] == f"{archive.url}/dag/one/checkpoint-8"


def test_pins_are_shown_and_hold_against_deleting(archive: Archive) -> None:
    assert run("checkpoints", "pin", archive.url, "one/checkpoint-8", "--reason", "released").stdout.endswith(
        "pinned\n"
    )
    assert re.search(r"one +checkpoint-8 .*pinned", run("checkpoints", "list", archive.url).stdout)
    place = archive.place("dag/one/checkpoint-8")
    with pytest.raises(store.StoreError, match="is pinned"):
        store.delete_checkpoint(place)
    assert store.verify(place, store.read_manifest(place)) == {}
    assert "unpinned" in run("checkpoints", "unpin", archive.url, "one/checkpoint-8").stdout
    assert "was not pinned" in run("checkpoints", "unpin", archive.url, "one/checkpoint-8").stdout
    store.delete_checkpoint(place)
    assert run("checkpoints", "pin", archive.url, "one/checkpoint-8").returncode == 1


def test_verify_names_every_damaged_object(archive: Archive) -> None:
    done = run("checkpoints", "verify", archive.url)
    assert (done.returncode, done.stderr, done.stdout.count(": fine,")) == (0, "", 3)
    bucket = store.open_bucket(archive.target)
    bucket.delete_object(archive.place("dag/one/checkpoint-8").key("deep/state.pt"))
    bucket.put_object(archive.place("dag/one/checkpoint-16").key("model.safetensors"), b"short")
    bucket.put_object(archive.place("dag/two/checkpoint-8").key("manifest.json"), b"{}")
    done = run("checkpoints", "verify", archive.url)
    assert done.returncode == 1
    assert "one/checkpoint-8/deep/state.pt: is not there" in done.stderr
    assert "one/checkpoint-16/model.safetensors: has size 5" in done.stderr
    assert "two/checkpoint-8/manifest.json: not a manifest" in done.stderr
    assert "DAMAGED" in run("checkpoints", "list", archive.url).stdout
    one = run("checkpoints", "verify", archive.url, "one/checkpoint-16")
    assert (one.returncode, one.stderr.count("oss://")) == (1, 1)


def test_deep_finds_what_a_head_request_does_not_show(archive: Archive, disk: Path) -> None:
    done = run("checkpoints", "verify", archive.url, "--deep")
    assert (done.returncode, done.stdout.count("every byte read")) == (0, 3)
    # A disk that lies: the server tells the CRC64 that the object once had, and gives other bytes.
    archive.save("three", 8, day=3)
    content = b"three 8" * 5000
    [blob] = [path for path in disk.rglob("*") if path.is_file() and path.read_bytes() == content]
    blob.write_bytes(content[:-1] + b"9")
    assert run("checkpoints", "verify", archive.url, "three/checkpoint-8").returncode == 0
    done = run("checkpoints", "verify", archive.url, "three/checkpoint-8", "--deep")
    assert done.returncode == 1
    assert "three/checkpoint-8/model.safetensors: has 35000 bytes with CRC64" in done.stderr


def test_restore_brings_the_same_bytes_and_goes_on_where_it_was_broken(archive: Archive, tmp_path: Path) -> None:
    done = run("checkpoints", "restore", archive.url, "latest", "--to", str(tmp_path / "here"))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "here" / "checkpoint-8"
    assert f"{folder}: 2 files" in done.stdout
    assert (folder / "model.safetensors").read_bytes() == (archive.folder / "two/8/model.safetensors").read_bytes()
    assert not list((tmp_path / "here").glob(".*.partial"))
    (folder / "deep/state.pt").write_bytes(b"other")
    again = run("checkpoints", "restore", archive.url, "latest", "--to", str(tmp_path / "here"))
    assert again.returncode == 1
    assert "exists and differs: deep/state.pt" in again.stderr


def test_a_damaged_checkpoint_never_appears(archive: Archive, tmp_path: Path) -> None:
    bucket = store.open_bucket(archive.target)
    bucket.put_object(archive.place("dag/one/checkpoint-16").key("deep/state.pt"), b"S" * 16)
    done = run("checkpoints", "restore", archive.url, "one/checkpoint-16", "--to", str(tmp_path / "here"))
    assert done.returncode == 1
    assert "CRC64" in done.stderr
    assert not (tmp_path / "here" / "checkpoint-16").exists()


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("checkpoint-8", "is there 2 times: name one of one/checkpoint-8, two/checkpoint-8"),
        ("one/checkpoint-9", "did you mean one/checkpoint-8?"),
        ("two/checkpoint-16", "no checkpoint 'two/checkpoint-16'"),
        ("best", "no checkpoints.keep_best"),
    ],
)
def test_what_names_nothing_or_too_much_is_a_sentence(archive: Archive, wanted: str, problem: str) -> None:
    done = run("checkpoints", "restore", archive.url, wanted)
    assert (done.returncode, done.stdout) == (1, "")
    assert problem in done.stderr


def test_the_best_is_what_the_recipe_means(archive: Archive, configs: Path, tmp_path: Path) -> None:
    done = run("checkpoints", "restore", "r", "best", "--to", str(tmp_path), config=configs)
    assert "checkpoint-16: 2 files" in done.stdout, done.stderr


def test_nothing_there_is_a_fault(archive: Archive) -> None:
    done = run("checkpoints", "list", f"{archive.url}-elsewhere")
    assert (done.returncode, "no checkpoint has a manifest" in done.stderr) == (1, True)
    assert run("checkpoints", "verify", f"{archive.url}-elsewhere").returncode == 1
    assert run("checkpoints", "list", "oss://X").returncode == 1


# -- keys -----------------------------------------------------------------------------------------------------------


def test_a_connection_in_any_of_airflows_spellings() -> None:
    extra = {"region": "cn-hangzhou", "access_key_id": "k"}
    for text in (
        json.dumps({"conn_type": "oss", "extra": extra}),
        json.dumps({"conn_type": "oss", "extra": json.dumps(extra)}),
        "oss://?region=cn-hangzhou&access_key_id=k",
        "oss://?__extra__=%7B%22region%22%3A+%22cn-hangzhou%22%2C+%22access_key_id%22%3A+%22k%22%7D",
    ):
        assert parse_connection(text)["extra"] == extra
    fields = parse_connection("oss://k%2Fy:s%40t@oss-cn-hangzhou.aliyuncs.com/?region=cn-hangzhou")
    assert (fields["login"], fields["password"], fields["host"]) == ("k/y", "s@t", "oss-cn-hangzhou.aliyuncs.com")


def test_keys_come_from_the_environment_and_their_lack_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("OSS_", "AIRFLOW_CONN_OSS")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="OSS_ACCESS_KEY_ID, OSS_ACCESS_KEY_SECRET and OSS_REGION"):
        target_for("oss://bucket/a", "oss_default")
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", "k")
    with pytest.raises(ConfigError, match="the environment lacks access_key_secret, region"):
        target_for("oss://bucket/a", "oss_default")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "s")
    monkeypatch.setenv("OSS_REGION", "cn-hangzhou")
    target = target_for("oss://bucket/a", "oss_default")
    assert (target.endpoint, target.prefix) == ("https://oss-cn-hangzhou.aliyuncs.com", "a")


def test_airflows_own_command_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command's answer has this shape in 3.3; the real one is asked in tests/e2e."""
    answer = [{"conn_id": "mine", "login": None, "password": None, "host": None,
               "extra_dejson": {"access_key_id": "k", "access_key_secret": "s", "region": "cn-x"}}]  # fmt: skip
    script = tmp_path / "airflow"
    script.write_text(f"#!/bin/sh\n[ \"$*\" = 'connections get mine --output json' ] && echo '{json.dumps(answer)}'\n")
    script.chmod(0o755)
    monkeypatch.delenv("OSS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert target_for("oss://bucket/a", "mine").credentials.access_key_secret == "s"
    with pytest.raises(ConfigError, match="knows no such connection"):
        target_for("oss://bucket/a", "other")
