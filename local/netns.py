"""Hosts made of Linux namespaces, for the faults that loopback nodes cannot have: a cut cable, a machine that is off.

Each host has its own address, PID, mount, hostname and IPC namespaces, its own sshd with its own host key, its own
``/etc/hosts``, ``/dev/shm`` and ``/run``, and a disk of its own at ``/srv``; the rest of the file system is this
machine's. The hosts hang on a switch, and so does the controller, whose namespace has no default route: what runs there
reaches the hosts and nothing else. Needs root, iproute2, util-linux and OpenSSH's server.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from local.nodes import make_key
from local.processes import wait_for_port

P = ParamSpec("P")
T = TypeVar("T")

NETWORK = "10.200.0"
CONTROLLER = f"{NETWORK}.1"
PORT = 22
_CLONE_NEWNET = 0x40000000
_PREFIX = "swift-hosts"
_PROGRAMS = ("ip", "unshare", "setpriv", "mount", "hostname")
_numbers = itertools.count(1)

#: What a host does between power-on and sshd. Every value comes as an argument, none is part of the text.
_INIT = """\
set -e
name=$1 hosts=$2 boot_id=$3 disk=$4 sshd=$5 config=$6
hostname "$name"
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
mount --bind "$hosts" /etc/hosts
mount --bind "$boot_id" /proc/sys/kernel/random/boot_id
mount --bind "$disk" /srv
exec "$sshd" -D -e -f "$config"
"""


class NetnsError(RuntimeError):
    """The kernel or a program refused; the message holds its words."""


def why_not() -> str | None:
    """Why namespace hosts cannot be made on this machine, or ``None`` where they can."""
    if os.geteuid() != 0:
        return "namespace hosts need root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if _sshd() is None:
        missing.append("sshd")
    if missing:
        return f"namespace hosts need {', '.join(missing)} (iproute2, util-linux, openssh-server)"
    probe = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"the kernel refuses namespaces: {done.stderr.strip()}" if done.returncode else None


@dataclass
class Host:
    """One host. ``folder`` is where its files lie on this machine; ``disk`` there is its ``/srv``."""

    name: str
    index: int
    folder: Path
    client_key: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Its address in the cluster's network."""
        return f"{NETWORK}.{10 + self.index}"

    @property
    def mac(self) -> str:
        """The hardware address of its network card."""
        return f"02:00:00:00:00:{10 + self.index:02x}"

    @property
    def disk(self) -> Path:
        """Its ``/srv``; survives a power-off."""
        return self.folder / "srv"

    @property
    def host_key(self) -> str:
        """``type base64`` of the public host key."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    def connection(self) -> dict[str, object]:
        """The Airflow connection for this host."""
        return {
            "conn_type": "ssh",
            "host": self.address,
            "port": PORT,
            "login": "root",
            "extra": {"key_file": str(self.client_key), "host_key": self.host_key},
        }

    def processes(self) -> list[int]:
        """The pids, as this machine numbers them, of everything that runs on the host; empty when it is off."""
        init = _init_of(self.process)
        if init is None:
            return []
        own = _pid_namespace(init)
        return [pid for pid in _all_pids() if own is not None and _pid_namespace(pid) == own]


@dataclass
class HostCluster:
    """Hosts on one switch; several clusters can be up at once, none sees another.

    Use it as a context manager, or call :meth:`down` however a test ends. Hosts die with the process that started them.

    Args:
        folder: where keys, logs and the hosts' disks live.
    """

    folder: Path
    hosts: list[Host] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._cut: set[str] = set()
        self._controller: ThreadPoolExecutor | None = None

    # -- up and down ------------------------------------------------------------------------------------------

    def up(self, count: int = 2) -> None:
        """Starts ``count`` hosts, ``node1`` and so on; returns when each accepts logins.

        Raises:
            NetnsError: see :func:`why_not`, or what the kernel said; nothing is left behind.
        """
        reason = why_not()
        if reason:
            raise NetnsError(reason)
        remove_leftovers()
        try:
            self._make_switch()
            self._make_files(count)
            for host in self.hosts:
                self.boot(host.name)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Ends every process of every host and removes all namespaces; safe to repeat."""
        for host in self.hosts:
            _end(host)
        if self._controller is not None:
            self._controller.shutdown(cancel_futures=True)
            self._controller = None
        for name in _namespaces():
            if name.startswith(f"{self.name}-"):
                _remove_namespace(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def _make_switch(self) -> None:
        _ip("netns", "add", self._namespace("switch"))
        _ip("link", "add", "br0", "type", "bridge", inside=self._namespace("switch"))
        _ip("link", "set", "br0", "up", inside=self._namespace("switch"))
        self._plug("controller", CONTROLLER, "02:00:00:00:00:01")
        self._controller = ThreadPoolExecutor(1, "controller", _enter_network, (self._namespace("controller"),))

    def _make_files(self, count: int) -> None:
        client_key = self.folder / "client_key"
        make_key(client_key, self.name)
        self.hosts = [
            Host(f"node{index}", index, self.folder / f"node{index}", client_key) for index in range(1, count + 1)
        ]
        lines = ["127.0.0.1 localhost", f"{CONTROLLER} controller"]
        lines += [f"{host.address} {host.name}" for host in self.hosts]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        for host in self.hosts:
            host.disk.mkdir(parents=True, exist_ok=True)
            make_key(host.folder / "host_key", host.name)
            shutil.copy(f"{client_key}.pub", host.folder / "authorized_keys")
            (host.folder / "sshd_config").write_text(_sshd_config(host))

    def _plug(self, name: str, address: str, mac: str) -> None:
        """A namespace with a cable to the switch. Neighbours are known for good, so that a cut is silence and no error,
        as behind a router."""
        space, switch = self._namespace(name), self._namespace("switch")
        _ip("netns", "add", space)
        cable = ("link", "add", "eth0", "address", mac, "type", "veth", "peer", "name", name, "netns", switch)
        _ip(*cable, inside=space)
        _ip("link", "set", name, "master", "br0", "up", inside=switch)
        _ip("addr", "add", f"{address}/24", "dev", "eth0", inside=space)
        for device in ("lo", "eth0"):
            _ip("link", "set", device, "up", inside=space)

    def _introduce(self, host: Host) -> None:
        others = [("controller", CONTROLLER, "02:00:00:00:00:01")]
        others += [(other.name, other.address, other.mac) for other in self.hosts if other is not host]
        existing = set(_namespaces())
        for name, address, mac in others:
            self._know(host.name, address, mac)
            if self._namespace(name) in existing:
                self._know(name, host.address, host.mac)

    def _know(self, name: str, address: str, mac: str) -> None:
        words = ("neigh", "replace", address, "lladdr", mac, "dev", "eth0", "nud", "permanent")
        _ip(*words, inside=self._namespace(name))

    def _namespace(self, name: str) -> str:
        return f"{self.name}-{name}"

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    # -- faults -----------------------------------------------------------------------------------------------

    def cut(self, name: str) -> None:
        """Pulls the host's cable: packets stop in both directions, nobody is told."""
        _ip("link", "set", self[name].name, "nomaster", inside=self._namespace("switch"))
        self._cut.add(name)

    def heal(self, name: str) -> None:
        """Plugs the cable in again."""
        if name in self._cut:
            _ip("link", "set", name, "master", "br0", inside=self._namespace("switch"))
            self._cut.discard(name)

    def kill(self, name: str) -> None:
        """Kills every process of the host; its kernel closes their connections and refuses new ones until a boot."""
        _end(self[name])

    def poweroff(self, name: str) -> None:
        """The host is off: no process, and not a packet to say so."""
        self.cut(name)
        _end(self[name])
        self._unplug(name)

    def boot(self, name: str) -> None:
        """Starts a host that is off, killed, or new: same keys and ``/srv``, another boot id.

        Raises:
            NetnsError: it still runs.
            RuntimeError: its sshd ended at once; the log is in its folder.
        """
        host = self[name]
        if host.process is not None:
            raise NetnsError(f"{name} still runs")
        self._unplug(name)
        self._plug(name, host.address, host.mac)
        self._introduce(host)
        boot_id = host.folder / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        command = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self._namespace(name)]
        command += ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += ["sh", "-c", _INIT, "init", name, str(self.folder / "hosts"), str(boot_id), str(host.disk)]
        command += [str(_sshd()), str(host.folder / "sshd_config")]
        with open(host.folder / "console.log", "ab") as console:
            host.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True
            )
        self.call(wait_for_port, host.address, PORT, 20.0, host.process)

    def _unplug(self, name: str) -> None:
        """The cable goes first: a namespace that is deleted takes its cable away at some later time."""
        if self._namespace(name) in _namespaces():
            with contextlib.suppress(NetnsError):
                _ip("link", "del", name, inside=self._namespace("switch"))
            _remove_namespace(self._namespace(name))
        self._cut.discard(name)

    # -- being the controller ---------------------------------------------------------------------------------

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``function`` in a thread whose sockets, and those of threads that it starts, are the controller's.

        Raises:
            NetnsError: the cluster is not up.
        """
        if self._controller is None:
            raise NetnsError("the cluster is not up")
        return self._controller.submit(function, *args, **kwargs).result()

    def command(self, *argv: str) -> list[str]:
        """The command line that runs ``argv`` as a process of the controller."""
        return ["ip", "netns", "exec", self._namespace("controller"), *argv]


def remove_leftovers() -> None:
    """Removes the empty namespaces of clusters whose process was killed before it could take them down."""
    for name in _namespaces():
        match = re.fullmatch(rf"{_PREFIX}-(\d+)-\d+-\w+", name)
        if match and not Path("/proc", match[1]).exists() and not _ip("netns", "pids", name).strip():
            _remove_namespace(name)


def _sshd() -> str | None:
    return shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


def _sshd_config(host: Host) -> str:
    return f"""\
ListenAddress {host.address}:{PORT}
HostKey {host.folder}/host_key
PidFile none
AuthorizedKeysFile {host.folder}/authorized_keys
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
MaxStartups 100:30:400
MaxSessions 100
SetEnv SHLVL=1
Subsystem sftp internal-sftp
"""


def _ip(*words: str, inside: str | None = None) -> str:
    command = ["ip", *(("-n", inside) if inside else ()), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetnsError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]


def _remove_namespace(name: str) -> None:
    for pid in _ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "del", name)


def _enter_network(namespace: str) -> None:
    """Moves the calling thread into a network namespace; all its later sockets belong there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise NetnsError(f"setns {namespace}: {os.strerror(number)}")


def _init_of(process: subprocess.Popen[bytes] | None) -> int | None:
    """Pid 1 of a host, as this machine numbers it: the only child of ``unshare``."""
    if process is None:
        return None
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def _end(host: Host, patience: float = 10.0) -> None:
    """Kills pid 1 of the host. Its parent sees it end only when the kernel has ended every process of the host."""
    if host.process is None:
        return
    init = _init_of(host.process)
    with contextlib.suppress(ProcessLookupError):
        os.kill(init if init is not None else host.process.pid, signal.SIGKILL)
    limit = time.monotonic() + patience
    while host.process.poll() is None:
        if time.monotonic() > limit:
            host.process.kill()
            raise NetnsError(f"{host.name} does not end within {patience:g} s")
        time.sleep(0.01)
    host.process = None


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _pid_namespace(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return None
