"""Activation scripts, containers and overridable arguments in the plan and in the jobs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_provider.config import Cluster, ConfigError, Recipe
from swift_provider.planning.environment import activated
from swift_provider.planning.launch import job_spec
from swift_provider.planning.params import params_of
from swift_provider.planning.plan import LaunchPlan
from swift_provider.planning.planner import make_plan
from trainer.protocol import MARKER, JobSpec, Owner


def recipe(**more: Any) -> Recipe:
    swift = {"args": {"model": "org/m", "dataset": ["/data/a.jsonl", "/srv/b.jsonl"]}, "env": {"NCCL_DEBUG": "INFO"}}
    return Recipe.model_validate({"name": "r", "cluster": "c", "swift": swift, **more})


def plan(r: Recipe | None = None, params: dict[str, Any] | None = None, **more: Any) -> LaunchPlan:
    nodes = [{"name": f"n{i}", "ssh_conn_id": f"s{i}", "address": f"10.0.0.{i}", "slots": 4} for i in (1, 2)]
    cluster = Cluster.model_validate(
        {"name": "c", "python": "/env/bin/python", "nodes": nodes, "workdir": "/w", **more}
    )
    return make_plan(r or recipe(), cluster, dag_id="d", run_id="r", params=params)


def spec(p: LaunchPlan, node: int = 0) -> JobSpec:
    return job_spec(p, p.nodes[node], job_id="j1", owner=Owner(), staged={"/data/a.jsonl": "/w/cache/a.jsonl"})


def test_the_environment_wins_in_order() -> None:
    p = plan(network={"kind": "roce", "interface": "eth0", "debug": "WARN"}, env={"NCCL_SOCKET_IFNAME": "bond0"})
    assert (p.env["NCCL_SOCKET_IFNAME"], p.env["GLOO_SOCKET_IFNAME"], p.env["NCCL_DEBUG"]) == ("bond0", "eth0", "INFO")


def test_gpus_of_a_selection_reach_the_job() -> None:
    p = plan(params={"nodes": ["n1:0,2@n2:1,3"]})
    assert (p.world_size, spec(p).gpus, spec(p, 1).gpus) == (4, [0, 2], [1, 3])
    assert spec(p).env["NPROC_PER_NODE"] == "2"
    assert "n2: GPUs 1, 3" in p.describe()
    with pytest.raises(ConfigError, match="torchrun needs the same number"):
        plan(params={"nodes": ["n1:0,2@n2:1"]})
    with pytest.raises(ConfigError, match="torchrun needs the same number"):
        plan(params={"exclude": ["n1:0"]})


def test_a_container_to_the_word() -> None:
    docker = {
        "image": "registry.example/swift:4.6@sha256:abc",
        "mounts": ["/data/models:/models:ro", "/srv"],
        "shm_size": "64g",
        "devices": ["/dev/infiniband"],
        "ulimits": {"nofile": 1048576},
        "user": "1000:1000",
    }
    p = plan(
        docker=docker, env={"TOKEN_FILE": "/run/secret", "ODD": "a b'c\"$d\n"}, params={"nodes": ["n1:0,2", "n2:1,3"]}
    )
    job = spec(p)
    assert job.argv == [
        *("docker", "run", "--rm", "--init", "--sig-proxy=true", "--name", "j1", "--network", "host"),
        *("--shm-size", "64g", "--gpus", "all"),
        *("--ulimit", "memlock=-1", "--ulimit", "stack=67108864", "--ulimit", "nofile=1048576"),
        *("--device", "/dev/infiniband"),
        *("--volume", "/data/models:/models:ro", "--volume", "/srv:/srv", "--volume", "/w:/w"),
        *(
            "--env",
            "CUDA_DEVICE_ORDER",
            "--env",
            "CUDA_VISIBLE_DEVICES",
            "--env",
            "MASTER_ADDR",
            "--env",
            "MASTER_PORT",
        ),
        *("--env", "NCCL_DEBUG", "--env", "NNODES", "--env", "NODE_RANK", "--env", "NPROC_PER_NODE", "--env", "ODD"),
        *("--env", "PYTHONUNBUFFERED", "--env", MARKER, "--env", "TOKEN_FILE"),
        *("--user", "1000:1000", "--workdir", "/w/jobs/j1", "--entrypoint", "/env/bin/python"),
        *("registry.example/swift:4.6@sha256:abc", "-m", "swift.cli.main", "sft", "/w/jobs/j1/swift.yaml"),
    ]
    assert not [word for word in job.argv for value in job.env.values() if len(value) > 6 and value in word]
    assert p.agent_python == "/usr/bin/python3"
    assert plan().agent_python == "/env/bin/python"


def test_a_container_shares_the_hosts_memory_unless_it_has_its_own() -> None:
    argv = spec(plan(docker={"image": "x"}, shared_dir="/shared")).argv
    assert argv[argv.index("--ipc") + 1] == "host"
    assert "/shared:/shared" in argv
    assert "/srv/b.jsonl:/srv/b.jsonl:ro" in argv  # an input that no mount holds
    assert "--gpus" not in spec(plan(docker={"image": "x"}, device="cpu")).argv


words = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=12)


@given(st.lists(words, max_size=4), st.lists(words, max_size=3))
@settings(max_examples=40, deadline=None)
def test_activation_passes_every_word_unchanged(tmp_path_factory: Any, arguments: list[str], own: list[str]) -> None:
    folder = tmp_path_factory.mktemp("activate")
    script = folder / "it's $(touch here) activate.sh"
    script.write_text('export SEEN=$#\nexport LAST="${!#}"\n')
    out = folder / "out"
    code = f"import json, os, sys; json.dump([sys.argv[1:], os.environ['SEEN']], open({str(out)!r}, 'w'))"
    argv = activated(["/usr/bin/env", "python3", "-c", code, *arguments], [str(script), *own])
    subprocess.run(argv, check=True, cwd=folder)
    assert json.loads(out.read_text()) == [arguments, str(len(own))]
    assert {path.name for path in folder.iterdir()} == {"out", script.name}


def test_activation_that_fails_starts_nothing(tmp_path: Path) -> None:
    bad = tmp_path / "bad.sh"
    bad.write_text("return 3\n")
    out = subprocess.run(activated(["echo", "started"], [str(bad)]), capture_output=True, text=True, check=False)
    assert (out.returncode, out.stdout) == (3, "")
    missing = subprocess.run(activated(["echo", "started"], ["/nowhere"]), capture_output=True, text=True, check=False)
    assert missing.returncode != 0
    assert "started" not in missing.stdout
    assert activated(["a"], []) == ["a"]
    assert spec(plan(activate="/opt/env.sh")).argv[-5:] == [
        *("/env/bin/python", "-m", "swift.cli.main", "sft", "/w/jobs/j1/swift.yaml")
    ]


def test_overridable_arguments() -> None:
    r = recipe(overridable=["lora_rank", "packing", "torch_dtype", "max_steps"])
    names = [param.name for param in params_of(r)]
    assert names.count("max_steps") == 1
    assert {"lora_rank", "packing", "torch_dtype"} <= set(names)
    p = plan(r, {"lora_rank": 16, "packing": False, "torch_dtype": None})
    assert (p.args["lora_rank"], p.args["packing"], "torch_dtype" in p.args) == (16, False, False)
    with pytest.raises(ConfigError, match="unknown parameter"):
        plan(recipe(), {"lora_rank": 16})
    for name, problem in (
        ("output_dir", "leave it out"),
        ("lora_rnk", "did you mean 'lora_rank'"),
        ("train_type", "tuner_type"),
    ):
        with pytest.raises(ConfigError, match=problem):
            plan(recipe(overridable=[name]))
