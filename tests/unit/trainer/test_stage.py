"""Staging of what lies on the node already; what comes from a bucket is in test_store."""

from __future__ import annotations

import os
import time

from trainer import stage as module
from trainer.protocol import StageItem, StageRequest
from trainer.stage import stage


def run(workdir, **sources):
    items = [StageItem(name, str(source)) for name, source in sources.items()]
    return stage(StageRequest(str(workdir), items)).items


def test_equal_content_has_an_equal_digest_wherever_it_lies(tmp_path):
    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "data.jsonl").write_text(text)
        (tmp_path / name / "model.bin").write_bytes(b"xyz")
    a, b, c = run(tmp_path / "work", a=tmp_path / "a", b=tmp_path / "b", c=tmp_path / "c")
    assert a.digest == b.digest != c.digest
    assert (a.path, a.files, a.size, a.fetched, a.error) == (str(tmp_path / "a"), 2, 4, 0, None)


def test_a_renamed_file_changes_the_digest(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    (first,) = run(tmp_path / "work", a=tmp_path / "a")
    (tmp_path / "a" / "x").rename(tmp_path / "a" / "y")
    (second,) = run(tmp_path / "work", a=tmp_path / "a")
    assert first.digest != second.digest


def test_a_warm_run_reads_nothing_and_a_changed_file_is_read_again(tmp_path, monkeypatch):
    source = tmp_path / "data"
    source.write_bytes(b"1" * 1000)
    (cold,) = run(tmp_path / "work", data=source)
    real, reads = module.hashlib.sha256, []
    monkeypatch.setattr(module, "_BLOCK", 100)

    def counting(*args):
        reads.append(args)
        return real(*args)

    monkeypatch.setattr(module.hashlib, "sha256", counting)
    (warm,) = run(tmp_path / "work", data=source)
    assert (warm.digest, len(reads)) == (cold.digest, 1)
    source.write_bytes(b"2" * 1000)
    os.utime(source, ns=(time.time_ns(), time.time_ns() + 10**9))
    (changed,) = run(tmp_path / "work", data=source)
    assert changed.digest != cold.digest


def test_each_item_fails_for_itself(tmp_path):
    (tmp_path / "ok").write_text("x")
    ok, missing, relative, keyless = run(
        tmp_path / "work", ok=tmp_path / "ok", missing="/no/such", relative="data.jsonl", keyless="oss://bucket/key"
    )
    assert ok.error is None
    assert "does not exist on this node" in missing.error
    assert "neither an absolute path nor" in relative.error
    assert "no endpoint and credentials" in keyless.error
