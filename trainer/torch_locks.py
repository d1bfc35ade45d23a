"""Stale locks of PyTorch's extension builds.

A build that is killed leaves ``<torch extensions>/**/lock`` behind, and every later training waits for that file to go
away, without an end and without a line in the log. The builder keeps the file open, so a lock that no process has open
is stale. On a network file system the builder may be on another machine: there only an old lock is removed.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Dict, List, Mapping, Set, Tuple

_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs", "rootfs"})
_OLD_S = 3600.0
PAUSE_S = 0.2  # between the two looks


def extensions_folder(environment: Mapping[str, str]) -> str:
    """Where PyTorch builds its extensions under this environment."""
    folder = environment.get("TORCH_EXTENSIONS_DIR")
    if folder:
        return folder
    home = environment.get("HOME") or os.path.expanduser("~")
    return os.path.join(environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "torch_extensions")


def remove_stale_locks(folder: str) -> List[str]:
    """Remove the stale locks below ``folder`` while others may build there; one caller at a time. Returns their paths.

    A builder that ends closes its lock an instant before it removes it; so a lock counts as stale only when it is the
    same file, and nobody's, in two looks. A stale lock keeps everyone else from making a new one in its place.
    """
    first = _nobodys_locks(folder)
    if not first:
        return []
    time.sleep(PAUSE_S)
    second = _nobodys_locks(folder)
    local = file_system(folder) in _LOCAL
    removed = []
    for path, (inode, changed) in first.items():
        if second.get(path) == (inode, changed) and (local or time.time() - changed > _OLD_S):
            with contextlib.suppress(OSError):
                os.unlink(path)
                removed.append(path)
    return removed


def _nobodys_locks(folder: str) -> Dict[str, Tuple[int, float]]:
    """Path → inode and time of the locks that no process has open."""
    found = {}
    for path in find_locks(folder):
        with contextlib.suppress(OSError):
            seen = os.stat(path)
            found[path] = (seen.st_ino, seen.st_mtime)
    in_use = open_files(list(found)) if found else set()
    return {path: seen for path, seen in found.items() if path not in in_use}


def find_locks(folder: str) -> List[str]:
    """The build locks below ``folder``."""
    return [os.path.join(where, "lock") for where, _, names in os.walk(folder) if "lock" in names]


def open_files(paths: List[str]) -> Set[str]:
    """Those of ``paths`` that some process has open, as far as this user may see."""
    wanted: Dict[str, str] = {os.path.realpath(path): path for path in paths}
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    if target in wanted:
                        found.add(wanted[target])
    return found


def file_system(path: str) -> str:
    """The type of the file system that ``path`` lies on (``ext4``, ``nfs4``, …)."""
    path, best, kind = os.path.realpath(path), "", ""
    with open("/proc/mounts", encoding="utf-8", errors="surrogateescape") as stream:
        for line in stream:
            point, fs_type = line.split()[1:3]
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, fs_type
    return kind
