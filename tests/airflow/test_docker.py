"""A container on a real node, with a recorder in place of ``docker``: how it is called, and how a stop gets there."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from swift_provider.config import Cluster, Recipe
from swift_provider.planning.plan import LaunchPlan
from swift_provider.planning.planner import make_plan
from tests.cluster.sites import Site, trainer_python, until
from trainer.process import marker
from trainer.protocol import MARKER, Phase

#: Writes down argv and environment byte for byte, then runs until TERM, as a client that forwards it would.
RECORDER = """\
#!{python} -IS
import json, os, signal, sys
out = os.path.join({folder!r}, os.environ["NODE_RANK"])
with open(out + ".tmp", "w") as stream:
    environment = {{name.hex(): value.hex() for name, value in os.environb.items()}}
    json.dump([[os.fsencode(word).hex() for word in sys.argv], environment], stream)
os.rename(out + ".tmp", out)
def end(number, frame):
    open(out + ".signal", "w").write(str(number))
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
while True:
    signal.pause()
"""
ODD = "a 'b' \"c\" $(d) `e` \\ \n\té 中文"


def plan_for(site: Site, program: Path) -> LaunchPlan:
    cluster = {
        "name": "c",
        "python": "/opt/env/bin/python",
        "nodes": site.cluster_nodes(2),
        "master_port": site.port,
        "env": {"ODD": ODD, "HF_TOKEN": "hf_very_secret"},
        "network": {"kind": "roce", "interface": "eth0"},
        "activate": ["/opt/activate.sh", "env name"],
        "docker": {
            "image": "swift:4.6",
            "program": str(program),
            "mounts": ["/data dir:/data:ro"],
            "devices": ["/dev/infiniband"],
            "agent_python": str(trainer_python()),
        },
    }
    recipe = {"name": "r", "cluster": "c", "swift": {"args": {"model": "org/m", "dataset": ["org/d"]}}, "grace": 5}
    return make_plan(
        Recipe.model_validate(recipe),
        Cluster.model_validate(cluster),
        dag_id="dag",
        run_id="run",
        params={"nodes": ["node1:0,1@node2:0,1"]},
    )


def test_the_container_of_each_node_byte_for_byte_and_its_stop(site: Site, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    program = tmp_path / "docker"
    program.write_text(RECORDER.format(python=trainer_python(), folder=str(seen)))
    program.chmod(0o755)
    plan = plan_for(site, program)
    job = site.start(plan)
    for rank, node in enumerate(plan.nodes):
        path = seen / str(rank)
        until(path.exists)
        argv, environ = json.loads(path.read_text())
        words = [bytes.fromhex(word).decode() for word in argv]
        environment = {bytes.fromhex(key).decode(): bytes.fromhex(value).decode() for key, value in environ.items()}
        folder = f"{node.workdir}/jobs/{job}"
        names = [words[index + 1] for index, word in enumerate(words) if word == "--env"]
        start = words.index("--env")
        end = start + 2 * len(names)
        assert words[:start] == [
            *(str(program), "run", "--rm", "--init", "--sig-proxy=true", "--name", job, "--network", "host"),
            *("--ipc", "host", "--gpus", "all", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
            *("--device", "/dev/infiniband", "--volume", "/data dir:/data:ro"),
            *("--volume", f"{node.workdir}:{node.workdir}"),
        ]
        assert words[end : end + 7] == ["--workdir", folder, "--entrypoint", "bash", "swift:4.6", "-c", words[end + 6]]
        assert words[end + 7 :] == [
            *("bash", "2", "/opt/activate.sh", "env name"),
            *("/opt/env/bin/python", "-m", "swift.cli.main", "sft", f"{folder}/swift.yaml"),
        ]
        expected = {
            **plan.env,
            "MASTER_ADDR": plan.master_address,
            "MASTER_PORT": str(site.port),
            "NNODES": "2",
            "NODE_RANK": str(rank),
            "NPROC_PER_NODE": "2",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": "0,1",
            MARKER: marker(node.workdir, job),
        }
        assert names == sorted(expected)
        assert {name: environment[name] for name in names} == expected
        assert (expected["ODD"], expected["NCCL_IB_DISABLE"]) == (ODD, "0")
        assert not [word for word in words if "hf_very_secret" in word or "中文" in word]
    site.with_group(plan, lambda group: site.gang(plan, group).stop(job, "by hand"))
    for rank, node in enumerate(plan.nodes):
        assert (seen / f"{rank}.signal").read_text() == str(int(signal.SIGTERM))
        name = node.name
        until(lambda name=name: site.state(name, job).phase in Phase.ENDED)
        assert site.state(name, job).killed == 0
        assert not site.processes(name)
