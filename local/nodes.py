"""Loopback nodes: real OpenSSH servers, run as the ordinary user, each with an address, a host key and a folder.

Where there is no sshd, asyncssh's own server takes its place (:mod:`local.asyncssh_node`), and says so.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from local.processes import end, spawn, wait_for_port

PORT = 2222


@dataclass
class LocalNode:
    """One loopback node. ``host_key`` is the public key, for the connection that verifies it."""

    name: str
    address: str
    port: int
    folder: Path
    client_key: Path
    user: str = field(default_factory=getpass.getuser)
    server: str = "sshd"
    process: subprocess.Popen[bytes] | None = None

    @property
    def workdir(self) -> Path:
        """The folder that a cluster file gives this node."""
        return self.folder / "workdir"

    @property
    def host_key(self) -> str:
        """``type base64`` of the public host key."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    def start(self) -> None:
        """Starts the SSH server and waits until it listens.

        Raises:
            RuntimeError: it ended at once; its log is beside its configuration.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        make_key(self.folder / "host_key", self.name)
        shutil.copy(f"{self.client_key}.pub", self.folder / "authorized_keys")
        sshd = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
        if sshd is None:
            self.server = "asyncssh"
            command = [sys.executable, "-m", "local.asyncssh_node", self.address, str(self.port), str(self.folder)]
        else:
            if os.geteuid() == 0:
                Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # what a root sshd insists on
            command = [sshd, "-D", "-e", "-f", str(self._write_config())]
        self.process = spawn(command, self.folder / "sshd.log", cwd=Path(__file__).resolve().parent.parent)
        wait_for_port(self.address, self.port, 15, self.process)

    def _write_config(self) -> Path:
        # SHLVL: bash reads ~/.bashrc when sshd runs it, but not on the second level. What a developer has in there
        # costs every command, and a session that is killed in the middle of it can leave a lock behind.
        config = self.folder / "sshd_config"
        config.write_text(
            f"""\
ListenAddress {self.address}:{self.port}
HostKey {self.folder}/host_key
PidFile none
AuthorizedKeysFile {self.folder}/authorized_keys
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
        )
        return config

    def stop(self) -> None:
        """Ends the server; what was started through it goes on."""
        if self.process is not None:
            end(self.process)
            self.process = None

    def connection(self) -> dict[str, object]:
        """The Airflow connection for this node, as ``airflow connections import`` takes it."""
        return {
            "conn_type": "ssh",
            "host": self.address,
            "port": self.port,
            "login": self.user,
            "extra": {"key_file": str(self.client_key), "host_key": self.host_key},
        }


def make_key(path: Path, comment: str) -> None:
    """An ed25519 key pair at ``path`` and ``path.pub``, unless it is there."""
    if path.exists():
        return
    import asyncssh

    key = asyncssh.generate_private_key("ssh-ed25519", comment=comment)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(key.export_private_key())
    path.with_name(path.name + ".pub").write_bytes(key.export_public_key())


def make_nodes(root: Path, count: int = 2, port: int = PORT, first: int = 11) -> list[LocalNode]:
    """``count`` nodes on 127.0.0.``first``… below ``root``, not started; they share one client key."""
    client_key = root / "client_key"
    make_key(client_key, "swift-airflow local cluster")
    return [
        LocalNode(f"node{index}", f"127.0.0.{first - 1 + index}", port, root / "nodes" / f"node{index}", client_key)
        for index in range(1, count + 1)
    ]
