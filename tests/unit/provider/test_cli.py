"""The command line: answers on stdout, faults on stderr, exit status 1, never a traceback, never Airflow."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import yaml

from swift_provider.cli import main
from swift_provider.config import Cluster, Recipe
from swift_provider.config.loading import parse

PROJECT = Path(__file__).resolve().parents[3]
CONFIGS = PROJECT / "include" / "configs"


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(*words: str, stdin: str = "", config: Path = CONFIGS) -> Done:
    """The console script's function, in this process."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    variables = {"SWIFT_CONFIG_DIR": str(config), "SWIFT_LOCAL_PYTHON": "/p", "SWIFT_LOCAL_DIR": "/l"}
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(sys, "argv", ["swift-provider", *words]),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    return Done(code, out.getvalue(), err.getvalue())


def test_the_installed_command_needs_no_airflow() -> None:
    code = "import sys; import swift_provider.cli; print([m for m in sys.modules if m.split('.')[0] == 'airflow'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    command = Path(sys.executable).with_name("swift-provider")
    done = subprocess.run([command, "plan", "nobody"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no such file" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    shutil.copytree(CONFIGS, tmp_path / "configs")
    return tmp_path / "configs"


def test_every_shipped_file_is_fine() -> None:
    done = run("validate")
    assert (done.returncode, done.stderr) == (0, "")
    assert "recipes/tiny-cpu.yaml: fine" in done.stdout
    assert "clusters/two-a100-nodes.yaml: fine" in done.stdout


def test_validate_names_every_fault_and_the_good_files(configs: Path) -> None:
    recipe = configs / "recipes" / "tiny-cpu.yaml"
    recipe.write_text(recipe.read_text().replace("max_steps: 24", "max_stepz: 24").replace("sums.jsonl]", "s.jsonl"))
    (configs / "clusters" / "one-gpu-node.yaml").write_text("name: one-gpu-node\n")
    done = run("validate", config=configs)
    assert done.returncode == 1
    assert "recipes/tiny-cpu.yaml:" in done.stderr
    assert "clusters/one-gpu-node.yaml: python: is missing" in done.stderr
    assert "recipes/qwen2.5-7b-lora-zero2-1node.yaml: fine" in done.stdout
    assert run("validate", "two-a100-nodes", config=configs).returncode == 0
    assert run("validate", str(recipe), config=configs).returncode == 1
    done = run("validate", "nobody", config=configs)
    assert (done.returncode, "no such file" in done.stderr) == (1, True)


def test_a_file_must_bear_its_name(configs: Path) -> None:
    (configs / "recipes" / "tiny-cpu.yaml").rename(configs / "recipes" / "other.yaml")
    done = run("validate", "other", config=configs)
    assert "name: is tiny-cpu, but the file is other.yaml" in done.stderr


def test_plan_is_what_the_dag_would_do() -> None:
    name = "qwen2.5-7b-full-zero3-2nodes"
    done = run("plan", name, "-p", "nodes=gpu1:0,1@gpu2:0,1", "--param", "max_steps=10", "-p", 'extra_args={"seed": 7}')
    assert (done.returncode, done.stderr) == (0, "")
    for line in ("world size 4 = gpu1:2 + gpu2:2", "gpu1: GPUs 0, 1", "  max_steps: 10", "  seed: 7"):
        assert line in done.stdout


def test_plan_ends_with_what_the_run_will_take(configs: Path, tmp_path: Path) -> None:
    from tests.unit.provider.configs import QWEN25_7B

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN25_7B))
    recipe = configs / "recipes" / "qwen2.5-7b-full-zero3-2nodes.yaml"
    recipe.write_text(recipe.read_text() + "seconds_per_step: 9\n")
    cluster = configs / "clusters" / "two-a100-nodes.yaml"
    cluster.write_text(cluster.read_text() + "price_per_hour: 98.5\n")
    extra = json.dumps({"model": str(model)})
    done = run("plan", recipe.stem, "-p", "max_steps=400", "-p", f"extra_args={extra}", config=configs)
    assert (done.returncode, done.stderr) == (0, "")
    assert "memory about " in done.stdout
    assert done.stdout.splitlines()[-3].startswith("checkpoint 99.3 GiB; 2 until prune (every 200 steps) = ")
    assert done.stdout.splitlines()[-2:] == [
        "hours 1.00 = 400 steps x 9 s (seconds_per_step of the recipe)",
        "cost 197.00 CNY = 2 nodes x 98.5 CNY/h x 1.00 h",
    ]
    assert "cost unknown: the cluster has no price_per_hour" in run("plan", "tiny-cpu").stdout


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["plan", "tiny-cpu", "-p", "max_steps=many"], "max_steps: must be a whole number (got 'many')"),
        (["plan", "tiny-cpu", "-p", "max_steps=0"], "must be 1 or more"),
        (["plan", "tiny-cpu", "-p", "dry_run=perhaps"], "must be true or false"),
        (["plan", "tiny-cpu", "-p", "max_steps"], "write name=value"),
        (["plan", "tiny-cpu", "-p", "max_stepz=1"], "did you mean 'max_steps'?"),
        (["plan", "tiny-cpu", "-p", "nodes=node3"], "did you mean"),
        (["plan", "tiny-cpu", "-p", "extra_args=[]"], "must be a JSON object"),
        (["plan", "local"], "is a cluster"),
        (["plan", "tiny-cpuu"], "no such file"),
        (["plan", "tiny-cpu", "--cluster", "locale"], "did you mean 'local'?"),
        (["args", "search", "zzz"], "no argument of sft holds 'zzz'"),
        (["args", "search", "x", "--command", "train"], "no command 'train'"),
        (["hostfile", "import", "/nowhere"], "/nowhere: No such file"),
        (["recipe", "import", "/nowhere"], "/nowhere: No such file"),
        (["recipe", "import", "-"], "holds no training"),
    ],
)
def test_faults_are_sentences(words: list[str], problem: str) -> None:
    done = run(*words)
    assert done.returncode == 1
    assert problem in done.stderr


def test_arguments_are_found_by_old_names_too() -> None:
    done = run("args", "search", "--max-packed")
    assert (done.returncode, "packing_length" in done.stdout) == (0, True)
    done = run("args", "search", "tensor_model", "--command", "megatron sft")
    assert "tensor_model_parallel_size" in done.stdout


def test_a_hostfile_becomes_a_cluster() -> None:
    hosts = "# ours\ngpu1 slots=8\nroot@gpu2:2222 slots=8 max=9\n"
    done = run("hostfile", "import", "-", "--name", "ours", "--ssh-conn-id", "swift_{host}", stdin=hosts)
    assert done.returncode == 0
    cluster = parse(Cluster, done.stdout, "c.yaml", {})
    assert [(n.name, n.ssh_conn_id, n.address) for n in cluster.nodes] == [
        ("gpu1", "swift_gpu1", "gpu1"),
        ("gpu2-2222", "swift_gpu2", "gpu2"),
    ]
    assert "root@gpu2:2222: user and port belong into the Airflow connection swift_gpu2" in done.stderr
    done = run("hostfile", "import", "-", stdin="gpu1\ngpu2 slots=x\n")
    assert done.returncode == 1
    assert "line 1: bad entry 'gpu1'" in done.stderr
    assert "line 2: bad entry" in done.stderr


def test_a_command_line_becomes_a_recipe_that_can_be_planned(configs: Path) -> None:
    command = "NPROC_PER_NODE=1 \\\nswift sft --model /m --train_type lora \\\n --dataset /d.jsonl --lora_rank 8\n"
    done = run("recipe", "import", "--name", "mine", "--cluster", "one-gpu-node", stdin=command)
    assert done.returncode == 0
    assert "note: --train_type: is called tuner_type today" in done.stderr
    assert parse(Recipe, done.stdout, "r.yaml", {}).swift.args["tuner_type"] == "lora"
    (configs / "recipes" / "mine.yaml").write_text(done.stdout)
    assert run("validate", "mine", config=configs).returncode == 0
    done = run("recipe", "import", stdin="swift sft --model /m --dataset /d.jsonl --nope 1")
    assert done.returncode == 1
    assert "FAULT: swift.args.nope" in done.stderr
    assert yaml.safe_load(done.stdout)["swift"]["args"]["model"] == "/m"
