"""Hostfiles, selections and spares: by DeepSpeed's own code where it has a say."""

from __future__ import annotations

import ast
import collections
import logging
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from local import envs
from swift_provider.config import Cluster, ConfigError
from swift_provider.config.hostfile import parse_hostfile, parse_selection
from swift_provider.config.loading import parse
from swift_provider.planning.selection import select_nodes


@pytest.fixture(scope="module")
def deepspeed() -> dict[str, Any]:
    """The parsing functions of the pinned DeepSpeed, taken from its launcher without importing it."""
    found = next(envs.env_dir("trainer").glob("lib/python*/site-packages/deepspeed/launcher/runner.py"), None)
    if found is None:
        pytest.skip("the trainer environment is not built")
    wanted = ("_parse_hostfile", "_stable_remove_duplicates", "parse_node_config", "parse_node_config_list")
    wanted += ("parse_resource_filter", "parse_inclusion_exclusion")
    tree = ast.parse(found.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    assert len(tree.body) == len(wanted)
    logger = logging.getLogger("oracle")
    logger.disabled = True
    space: dict[str, Any] = {"re": re, "collections": collections, "deepcopy": deepcopy, "logger": logger}
    space |= {"defaultdict": collections.defaultdict}
    exec("from typing import *", space)  # noqa: S102
    exec(compile(tree, str(found), "exec"), space)  # noqa: S102
    return space


GOOD = """\
# training hosts
gpu1 slots=8

root@gpu2   slots=8 max_slots=8  # second
gpu3:2222\tslots=8x
"""


def test_the_format_with_all_its_corners() -> None:
    hosts = parse_hostfile(GOOD)
    assert [(h.text, h.name, h.host, h.user, h.port, h.slots, h.line) for h in hosts] == [
        ("gpu1", "gpu1", "gpu1", "", None, 8, 2),
        ("root@gpu2", "gpu2", "gpu2", "root", None, 8, 4),
        ("gpu3:2222", "gpu3-2222", "gpu3", "", 2222, 8, 5),
    ]
    assert hosts[1].fill("swift_{user}_{host}_{port}") == "swift_root_gpu2_22"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("# only\n", "is empty"),
        ("h1\n", "line 1: bad entry 'h1'"),
        ("h1 slots =8\n", "line 1: bad entry"),
        ("a slots=1\n\nh1 slots=8\nh1 slots=4\n", "line 4: h1 is there twice (first in line 3)"),
        ("h1 slots=0\n", "line 1: h1 has no slots"),
        ("a@b@c slots=1\nx\n", "line 2: bad entry"),
    ],
)
def test_bad_lines_have_numbers(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse_hostfile(text)


lines = st.one_of(
    st.text(alphabet=" \t#ah1:@.=slot08x\x0b\x0c\x1c\x85\u3000", max_size=20),
    st.builds(
        "{}{}{}slots={}{}".format,
        st.sampled_from(["", "  "]),
        st.sampled_from(["a", "b", "u@c", "d:22"]),
        st.sampled_from([" ", "\t", "  ", ""]),
        st.integers(1, 16),
        st.sampled_from(["", "x", " # c", " max=1"]),
    ),
)


@given(rows=st.lists(lines, max_size=5), end=st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=400)
def test_what_deepspeed_reads_is_read_and_what_it_refuses_is_refused(
    deepspeed: dict[str, Any], rows: list[str], end: str
) -> None:
    text = end.join(rows)
    read = [line + "\n" for line in text.replace("\r\n", "\n").split("\n")]
    try:
        theirs = dict(deepspeed["_parse_hostfile"](read))
    except ValueError:
        theirs = None
    try:
        ours = {host.text: host.slots for host in parse_hostfile(text)}
    except ValueError as error:
        stricter = "is no host;" in str(error) or "has no slots" in str(error)
        assert theirs is None or stricter
    else:
        assert ours == theirs


NAMES = ["h1", "h2", "h3"]
parts = st.builds(
    lambda name, slots: name + (":" + ",".join(map(str, slots)) if slots else ""),
    st.sampled_from([*NAMES, "h9"]),
    st.lists(st.integers(0, 4), max_size=3),
)
selections = st.lists(parts, min_size=1, max_size=4).map("@".join)


@given(selection=selections, exclude=st.booleans())
@settings(max_examples=400)
def test_include_and_exclude_mean_what_they_mean_to_deepspeed(
    deepspeed: dict[str, Any], selection: str, exclude: bool
) -> None:
    cluster = make([{"name": name, "slots": 4} for name in NAMES])
    include = ("", selection) if exclude else (selection, "")
    try:
        theirs = dict(deepspeed["parse_inclusion_exclusion"](dict.fromkeys(NAMES, 4), *include))
    except ValueError:
        theirs = {}
    # DeepSpeed lets "h1@h1:0" mean slot 0 alone; all of h1 and slot 0 of it are all of h1 here.
    words = [part.partition(":") for part in selection.split("@")]
    whole = {name for name, colon, _ in words if not colon}
    if whole & {name for name, colon, _ in words if colon}:
        return
    chosen, faults = select_nodes(cluster, *include)
    ours = {} if faults else {node.name: node.gpus or list(range(node.slots)) for node in chosen}
    assert ours == theirs
    assert list(ours) == list(theirs)


def make(nodes: list[dict[str, Any]], **more: Any) -> Cluster:
    nodes = [{"ssh_conn_id": f"ssh_{node['name']}", **node} for node in nodes]
    return Cluster.model_validate({"name": "c", "python": "/p", "nodes": nodes, **more})


RACK = make(
    [
        {"name": "a", "slots": 8, "labels": ["rack1"]},
        {"name": "b", "slots": 8, "labels": ["rack1"]},
        {"name": "c", "slots": 8, "labels": ["rack2"]},
        {"name": "s1", "slots": 4, "spare": True},
        {"name": "s2", "slots": 8, "spare": True},
        {"name": "half", "slots": 2, "gpus": [6, 7], "spare": True},
    ]
)


@pytest.mark.parametrize(
    ("include", "exclude", "names"),
    [
        (None, None, "a b c"),
        (["c", "a"], None, "a c"),
        (["rack1"], None, "a b"),
        (["s2"], None, "s2"),
        (None, ["b"], "a c s2"),
        (None, ["b", "s2"], "a c"),
        (None, ["a", "b"], "c s2"),
        (["a", "b"], ["b"], "a s2"),
        (["a", "s2"], ["a"], "s2"),
        (["a"], ["c"], "a"),
        ("a@c", None, "a c"),
    ],
)
def test_spares_stand_in_and_nothing_else(include: Any, exclude: Any, names: str) -> None:
    chosen, faults = select_nodes(RACK, include, exclude)
    assert not faults
    assert [node.name for node in chosen] == names.split()


def test_slots_become_gpus() -> None:
    chosen, _ = select_nodes(RACK, ["a:0,2", "half:7"], None)
    assert [(node.name, node.slots, node.gpus) for node in chosen] == [("a", 2, [0, 2]), ("half", 1, [7])]
    chosen, _ = select_nodes(RACK, None, ["a:0", "b:7"])
    assert (chosen[0].slots, chosen[0].gpus) == (7, [1, 2, 3, 4, 5, 6, 7])
    assert chosen[2].gpus is None


@pytest.mark.parametrize(
    ("include", "exclude", "problem"),
    [
        (["aa"], None, "no node 'aa'; did you mean 'a'?"),
        (["a:8"], None, "a has no slot 8; it has 0, 1, 2"),
        (["half:0"], None, "half has no slot 0; it has 6, 7"),
        (["a:x"], None, "'a:x' is no selection"),
        (["a:0-3"], None, "is no selection"),
        (["a"], ["a", "s2", "b", "c"], "leaves no node"),
        (7, None, "must be a list of names"),
        (["@"], None, "is no selection"),
    ],
)
def test_what_cannot_be_chosen(include: Any, exclude: Any, problem: str) -> None:
    _, faults = select_nodes(RACK, include, exclude)
    assert problem in "\n".join(map(str, faults))


@given(st.lists(st.text(max_size=12), max_size=3))
def test_any_text_is_a_selection_or_refused(texts: list[str]) -> None:
    try:
        picks = parse_selection(texts)
    except ValueError:
        return
    assert all(pick.name and "@" not in pick.name for pick in picks)


# -- the cluster file -----------------------------------------------------------------------------------------------


def load(text: str, folder: Path | None = None) -> Cluster:
    return parse(Cluster, "name: c\npython: /p\n" + text, "clusters/c.yaml", {}, folder)


def faults_of(text: str, folder: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, folder)
    return str(caught.value)


def test_a_cluster_from_a_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(GOOD)
    for text in (f"hostfile: {tmp_path}/hosts\n", "hostfile: hosts\n"):
        nodes = load(text, tmp_path).nodes
        assert [(node.name, node.ssh_conn_id, node.address, node.slots) for node in nodes] == [
            ("gpu1", "gpu1", "gpu1", 8),
            ("gpu2", "gpu2", "gpu2", 8),
            ("gpu3-2222", "gpu3", "gpu3", 8),
        ]
    cluster = load(
        "hostfile: |\n  gpu1 slots=8\n  gpu2 slots=8\nssh_conn_id: swift_{host}\n"
        "nodes: [{name: gpu2, spare: true, workdir: /big}]\n"
    )
    assert [(node.ssh_conn_id, node.spare, node.workdir) for node in cluster.nodes] == [
        ("swift_gpu1", False, None),
        ("swift_gpu2", True, "/big"),
    ]


def test_faults_of_a_hostfile_have_both_lines() -> None:
    text = faults_of("hostfile: |\n  gpu1 slots=8\n  gpu2\n  gpu1 slots=8\n")
    assert "clusters/c.yaml:3: hostfile: line 2: bad entry 'gpu2'" in text
    assert "line 3: gpu1 is there twice" in text
    assert "nodes" not in text.replace("hostfile", "")
    assert "cannot read /nowhere/hosts: No such file" in faults_of("hostfile: /nowhere/hosts\n")
    assert "gpu9: not in the hostfile" in faults_of("hostfile: gpu1 slots=8\nnodes: [{name: gpu9}]\n")
    assert "is not a template" in faults_of("hostfile: gpu1 slots=8\nssh_conn_id: '{hots}'\n")


def test_a_template_names_connections_of_written_nodes_too() -> None:
    assert load("ssh_conn_id: gpu_{host}\nnodes: [{name: a}]\n").nodes[0].ssh_conn_id == "gpu_a"
    assert "ssh_conn_id: is missing; add it" in faults_of("nodes: [{name: a}]\n")
    assert "nodes" in faults_of("")
    assert "all are spare" in faults_of("nodes: [{name: a, ssh_conn_id: s, spare: true}]\n")
    assert "the name of a node and a label" in faults_of("nodes: [{name: a, ssh_conn_id: s, labels: [a]}]\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("network: ethernet", {"NCCL_IB_DISABLE": "1"}),
        (
            "network: {kind: ethernet, interface: eth0}",
            {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"},
        ),
        (
            "network: {kind: roce, interface: bond0, hca: [mlx5_0, mlx5_1], gid_index: 3, debug: INFO}",
            {
                "NCCL_IB_DISABLE": "0",
                "NCCL_SOCKET_IFNAME": "bond0",
                "GLOO_SOCKET_IFNAME": "bond0",
                "NCCL_IB_HCA": "mlx5_0,mlx5_1",
                "NCCL_IB_GID_INDEX": "3",
                "NCCL_DEBUG": "INFO",
            },
        ),
        ("network: {kind: infiniband, hca: '=mlx5_0'}", {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "=mlx5_0"}),
    ],
)
def test_the_network_in_a_word(text: str, expected: dict[str, str]) -> None:
    network = load(f"nodes: [{{name: a, ssh_conn_id: s}}]\n{text}\n").network
    assert network is not None
    assert network.environment() == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("network: wifi", "network.kind"),
        ("network: {kind: ethernet, hca: mlx5_0}", "ethernet uses no RDMA adapter"),
        ("network: {kind: infiniband, gid_index: 3}", "only roce has one"),
        ("network: {kind: roce, interfce: x}", "did you mean 'interface'?"),
        ("docker: {image: x, mounts: [data]}", "is no mount"),
        ("docker: {image: --privileged}", "docker.image"),
        ("docker: {image: x, ulimits: {nofile: many}}", "nofile=many is none"),
        ("activate: env.sh", "is not an absolute path"),
    ],
)
def test_faults_of_the_environment(text: str, problem: str) -> None:
    assert problem in faults_of(f"nodes: [{{name: a, ssh_conn_id: s}}]\n{text}\n")
