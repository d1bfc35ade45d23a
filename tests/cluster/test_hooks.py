"""Connections to real sshds: what a user is told when one cannot be made, how the agent travels, what stays secret."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import Connection

from local.nodes import LocalNode, make_key
from local.processes import end, free_port, spawn, wait_for_port
from swift_provider.exceptions import AgentFailed, HostKeyUnknown, NodeUnreachable, TrainingError
from swift_provider.hooks.endpoint import endpoint_of
from swift_provider.hooks.group import NodeGroup
from swift_provider.hooks.nodes import NodesHook
from tests.cluster.sites import Site
from trainer.bundle import agent_bundle
from trainer.protocol import (
    JobsReply,
    JobsRequest,
    ListenReply,
    ListenRequest,
    OssCredentials,
    OssTarget,
    StageItem,
    StageReply,
    StageRequest,
)


def ask(group: NodeGroup, site: Site) -> Any:
    """The cheapest verb on every node."""
    requests = {name: JobsRequest(site.workdirs[name]) for name in group.sessions}
    return group.call_each("jobs", requests, JobsReply)


def answers(site: Site, **plan: Any) -> tuple[dict[str, JobsReply], dict[str, TrainingError]]:
    return site.with_group(site.plan(**plan), lambda group: ask(group, site))


def error_of(site: Site, name: str = "node1", **plan: Any) -> TrainingError:
    """What ``name`` failed with, while the other node answered."""
    replies, errors = answers(site, **plan)
    assert set(replies) == {"node1", "node2"} - {name}
    return errors[name]


def test_every_node_answers(site: Site) -> None:
    replies, errors = answers(site)
    assert list(replies) == ["node1", "node2"]
    assert not errors


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who has never logged in anywhere: no known_hosts, no ssh configuration."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("empty_home")
def test_an_unknown_host_key_is_refused_with_the_way_to_read_it(site: Site) -> None:
    site.publish("node1", extra={"host_key": None})
    error = error_of(site)
    assert type(error) is HostKeyUnknown
    node = site.nodes[0]
    assert f"ssh-keyscan -t ed25519 -p {node.port} {node.address}" in str(error)
    assert site.conn_id("node1") in str(error)


def test_a_wrong_host_key_is_refused(site: Site, tmp_path: Path) -> None:
    make_key(tmp_path / "other", "other")
    site.publish("node1", extra={"host_key": (tmp_path / "other.pub").read_text()})
    assert type(error_of(site)) is HostKeyUnknown


@pytest.mark.usefixtures("empty_home")
def test_no_host_key_check_says_so_and_means_it(site: Site) -> None:
    site.publish("node1", extra={"host_key": None, "no_host_key_check": "true"})
    assert not answers(site)[1]


def test_a_refused_login_names_the_connection(site: Site, tmp_path: Path) -> None:
    make_key(tmp_path / "stranger", "stranger")
    site.publish("node1", extra={"key_file": str(tmp_path / "stranger")})
    error = error_of(site)
    assert type(error) is NodeUnreachable
    assert "login refused" in str(error)
    assert site.conn_id("node1") in str(error)


def test_a_closed_port_is_said_at_once(site: Site) -> None:
    port = free_port("127.0.0.11")
    site.publish("node1", port=port)
    began = time.monotonic()
    error = error_of(site)
    assert type(error) is NodeUnreachable
    assert f"127.0.0.11:{port}" in str(error)
    assert time.monotonic() - began < 5


def test_a_missing_key_file_is_an_error_of_that_node_alone(site: Site, tmp_path: Path) -> None:
    site.publish("node1", extra={"key_file": str(tmp_path / "nowhere")})
    error = error_of(site)
    assert type(error) is NodeUnreachable
    assert "nowhere" in str(error)


def test_a_python_that_is_not_there_is_named_with_the_fix(site: Site) -> None:
    _, errors = answers(site, python="/opt/none/bin/python")
    for name in ("node1", "node2"):
        assert type(errors[name]) is AgentFailed
        assert "/opt/none/bin/python does not run on this node; set `python` in the cluster file" in str(errors[name])


def test_a_verb_that_takes_too_long_is_given_up(site: Site) -> None:
    request = ListenRequest(port=free_port(), nonce="n", timeout_s=3.0)

    async def work(group: NodeGroup) -> Any:
        return await group.call_each("listen", {"node1": request}, ListenReply, timeout=1.0)

    _, errors = site.with_group(site.plan(), work)
    assert type(errors["node1"]) is AgentFailed
    assert "no answer within 1 s" in str(errors["node1"])


# -- the agent ------------------------------------------------------------------------------------------------


def agents(site: Site, name: str = "node1") -> list[Path]:
    """All but the byte code that an agent keeps beside itself."""
    return [path for path in (site.folder(name) / "agent").iterdir() if ".pyz.cpython-" not in path.name]


def test_the_agent_is_shipped_once_and_used_again(site: Site) -> None:
    answers(site)
    [agent] = agents(site)
    digest, content = agent_bundle()
    assert (agent.name, agent.read_bytes()) == (f"{digest}.pyz", content)
    before = agent.stat()
    answers(site)
    assert agents(site) == [agent]
    assert (agent.stat().st_ino, agent.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_torn_agent_is_replaced(site: Site) -> None:
    answers(site)
    [agent] = agents(site)
    agent.write_bytes(agent.read_bytes()[:1000])
    assert not answers(site)[1]
    assert agent.read_bytes() == agent_bundle()[1]


@pytest.mark.parametrize("size", [0, 1000])
def test_byte_code_that_was_torn_is_not_used(site: Site, size: int) -> None:
    answers(site)
    [code] = (site.folder("node1") / "agent").glob("*.pyz.cpython-*")
    code.write_bytes(code.read_bytes()[:size])
    assert not answers(site)[1]


def test_ten_groups_that_ship_at_once_leave_one_whole_agent(site: Site) -> None:
    plan = site.plan()

    async def one() -> Any:
        async with NodesHook.for_plan(plan).group() as group:
            return await ask(group, site)

    async def ten() -> list[Any]:
        return await asyncio.gather(*(one() for _ in range(10)))

    for replies, errors in site.run(ten):
        assert not errors
        assert len(replies) == 2
    for name in ("node1", "node2"):
        assert [agent.read_bytes() for agent in agents(site, name)] == [agent_bundle()[1]]


HOSTILE = [
    "a folder with blanks",
    'it\'s "quoted"',
    "$(touch pwned)`touch pwned`;touch pwned",
    "文件夹 é \U0001f600",
    "-rf --",
    "line\nbreak",
    "back\\slash*?[x]{a,b}~#%&|<>",
]


@pytest.mark.parametrize("part", HOSTILE)
def test_a_hostile_work_folder_is_just_a_name(site: Site, part: str) -> None:
    for name in ("node1", "node2"):
        site.roots[name] = site.roots[name].parent / part
        site.workdirs[name] = str(site.roots[name])
    plan = site.plan(max_steps=2)
    job = site.start(plan)
    wait_for_end(site, job)
    for name in ("node1", "node2"):
        assert site.state(name, job).exit_code == 0
        assert b"step 2/2" in site.log(name, job)
        assert {path.name for path in site.roots[name].parent.iterdir()} == {part}
    assert not list(Path.cwd().glob("pwned"))
    assert not list(Path.home().glob("pwned"))


def wait_for_end(site: Site, job: str) -> None:
    plan = site.plan()
    site.with_group(plan, lambda group: site.gang(plan, group).wait_until_over(job))


# -- a burst of logins ------------------------------------------------------------------------------------------


@pytest.fixture
def strict_sshd(loopback_nodes: list[LocalNode], tmp_path: Path) -> Any:
    """An sshd for node1 that drops logins when more than a few are under way; others are added to its configuration."""
    started = []

    def start(replace: Callable[[str], str]) -> int:
        node = loopback_nodes[0]
        port = free_port(node.address)
        text = (node.folder / "sshd_config").read_text().replace(f":{node.port}", f":{port}")
        config = tmp_path / "sshd_config"
        config.write_text(replace(text))
        import shutil

        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        started.append(spawn([sshd, "-D", "-e", "-f", str(config)], tmp_path / "sshd.log"))
        wait_for_port(node.address, port, 15, started[-1])
        return port

    yield start
    for process in started:
        end(process)


def test_twelve_logins_get_through_where_sshd_allows_four(site: Site, strict_sshd: Any, tmp_path: Path) -> None:
    port = strict_sshd(lambda text: text.replace("MaxStartups 100:30:400", "MaxStartups 2:50:4"))
    site.publish("node1", port=port)
    plan = site.plan()

    async def one() -> Any:
        async with NodesHook.for_plan(plan).group() as group:
            return await group.call_each("jobs", {"node1": JobsRequest(site.workdirs["node1"])}, JobsReply)

    async def twelve() -> list[Any]:
        return await asyncio.gather(*(one() for _ in range(12)))

    results = site.run(twelve)
    assert [errors for _, errors in results if errors] == []
    assert "MaxStartups" in (tmp_path / "sshd.log").read_text()  # it did drop some


# -- a jump host --------------------------------------------------------------------------------------------------


def through(site: Site, port: int, **more: Any) -> dict[str, Any]:
    """Extras that lead through node1's address at ``port``."""
    first = site.nodes[0]
    return {"proxy_jump": f"{first.user}@{first.address}:{port}", "proxy_host_key": first.host_key, **more}


def test_all_nodes_share_one_login_on_their_jump_host(site: Site, strict_sshd: Any, tmp_path: Path) -> None:
    """Of more than one login at a time this one refuses every other."""
    port = strict_sshd(lambda text: text.replace("MaxStartups 100:30:400", "MaxStartups 1:100:1"))
    for node in site.nodes:
        site.publish(node.name, extra=through(site, port))
    plan = site.plan(max_steps=2)
    job = site.start(plan)
    wait_for_end(site, job)
    assert {site.state(node.name, job).exit_code for node in site.nodes} == {0}
    log = (tmp_path / "sshd.log").read_text()
    assert "MaxStartups" not in log
    assert log.count("Accepted publickey") == 2, "one for the start, one for the wait"


def test_a_jump_host_with_another_key_is_refused_and_the_extra_named(site: Site, strict_sshd: Any) -> None:
    port = strict_sshd(lambda text: text)
    wrong = site.nodes[1].host_key
    site.publish("node1", extra=through(site, port, proxy_host_key=wrong))
    error = error_of(site)
    assert type(error) is HostKeyUnknown
    assert "node1: jump host" in str(error)
    assert "proxy_host_key" in str(error)


@pytest.mark.parametrize("jump", ["a b", "u@", "host:port", "one,two", "u@h:123456"])
def test_a_jump_host_that_cannot_be_meant_is_refused(jump: str) -> None:
    with pytest.raises(ValueError, match="is not user@host:port"):
        endpoint_of(Connection(conn_id="gpu", conn_type="ssh", host="node", extra=json.dumps({"proxy_jump": jump})))


def test_a_proxy_command_is_cut_into_words_before_a_value_comes_in() -> None:
    extra = json.dumps({"proxy_command": "ssh -W %h:%p 'a jump'"})
    endpoint = endpoint_of(Connection(conn_id="gpu", conn_type="ssh", host="x -o ProxyCommand=y", port=7, extra=extra))
    assert endpoint.options["proxy_command"] == ["ssh", "-W", "x -o ProxyCommand=y:7", "a jump"]


def test_an_sshd_without_sftp_is_an_error_of_that_node(site: Site, strict_sshd: Any) -> None:
    site.publish("node1", port=strict_sshd(lambda text: text.replace("Subsystem sftp internal-sftp", "")))
    error = error_of(site)
    assert type(error) is AgentFailed
    assert "sftp" in str(error)


# -- secrets ------------------------------------------------------------------------------------------------------


def test_no_secret_of_a_request_is_seen_in_any_command_line_or_environment(site: Site) -> None:
    """A slow verb runs with a secret in its request while all of /proc is read again and again."""
    secret = "s3cr3t-" + site.tag
    credentials = OssCredentials("key-id", secret, security_token=f"token-{secret}")
    with silent_server() as endpoint:
        target = OssTarget(endpoint, "cn-hangzhou", "bucket", credentials=credentials)
        item = StageItem("model", "oss://bucket/model/", target)
        requests = {name: StageRequest(site.workdirs[name], [item]) for name in ("node1", "node2")}
        seen, stop = Spy(secret), threading.Event()
        watcher = threading.Thread(target=seen.watch, args=(stop,))
        watcher.start()
        try:
            replies, _ = site.with_group(
                site.plan(), lambda group: group.call_each("stage", requests, StageReply, timeout=4.0)
            )
        finally:
            stop.set()
            watcher.join()
    assert seen.verbs, "the verb was never seen running"
    assert not seen.found
    assert secret not in json.dumps([str(reply) for reply in replies.values()])
    for name in ("node1", "node2"):
        done = subprocess.run(["grep", "-r", secret, str(site.folder(name))], capture_output=True, check=False)
        assert done.returncode == 1, done.stdout


class Spy:
    """Reads the command lines and environments of all processes."""

    def __init__(self, secret: str) -> None:
        self.secret, self.found, self.verbs = secret.encode(), set(), 0

    def watch(self, stop: threading.Event) -> None:
        while not stop.is_set():
            for entry in Path("/proc").glob("[0-9]*"):
                for file in ("cmdline", "environ"):
                    try:
                        data = (entry / file).read_bytes()
                    except OSError:
                        continue
                    self.verbs += file == "cmdline" and b".pyz\0stage" in data
                    if self.secret in data:
                        self.found.add((entry.name, data))


class silent_server:  # noqa: N801 - used as a context manager
    """Accepts connections and never answers, so that a verb takes as long as it is let."""

    def __enter__(self) -> str:
        import socket

        self.socket = socket.create_server(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self.socket.close()
