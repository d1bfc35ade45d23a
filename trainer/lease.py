"""The lease: a node's promise to one job, of the whole node or of some of its GPUs.

It is made of flocks, so that it ends with the supervisor that holds it, however that ends. Whoever wants the whole node
locks it exclusively; whoever wants some GPUs shares the node and locks each of those. A note beside each lock says who
holds it. Leases are taken under the node's start lock only, one after the other.
"""

from __future__ import annotations

import contextlib
import os
from typing import Iterator, List, Optional, Sequence

from trainer.files import open_lock, remove_quietly, try_lock, write_atomic
from trainer.paths import NodePaths
from trainer.process import is_alive
from trainer.protocol import Holder, dumps
from trainer.records import read


class Busy(Exception):
    """The lease is with another job; ``holder`` names it, as far as it is known."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(f"held by job {holder.job_id}")
        self.holder = holder


@contextlib.contextmanager
def leased(node: NodePaths, gpus: Optional[Sequence[int]]) -> Iterator[List[int]]:
    """Hold the lease for the length of the block, or longer: for as long as a process keeps the descriptors.

    Raises:
        Busy: another job holds the node, or one of the GPUs.
    """
    taken: List[int] = []
    try:
        taken.append(open_lock(node.lease))
        if not try_lock(taken[0], shared=gpus is not None):
            raise Busy(_holder(node))
        for index in sorted(gpus or ()):
            taken.append(open_lock(node.gpu_lock(index)))
            if not try_lock(taken[-1]):
                raise Busy(_holder(node, index))
        yield taken
    finally:
        for descriptor in taken:
            os.close(descriptor)


def _holder(node: NodePaths, gpu: Optional[int] = None) -> Holder:
    """Who holds the node, or that GPU."""
    for holder in holders(node):
        if gpu is None or holder.gpus is None or gpu in holder.gpus:
            return holder
    return Holder("unknown")


def write_notes(node: NodePaths, holder: Holder) -> None:
    """Say beside each lock who holds it."""
    for path in _notes(node, holder.gpus):
        write_atomic(path, dumps(holder).encode())


def give_back(node: NodePaths, gpus: Optional[Sequence[int]], descriptors: Sequence[int]) -> None:
    """Remove the notes and free the locks, in this order: the next holder writes its own."""
    for path in _notes(node, gpus):
        with contextlib.suppress(OSError):
            remove_quietly(path)
    for descriptor in descriptors:
        os.close(descriptor)


def _notes(node: NodePaths, gpus: Optional[Sequence[int]]) -> List[str]:
    return [node.holder] if gpus is None else [node.gpu_holder(index) for index in gpus]


def holders(node: NodePaths) -> List[Holder]:
    """Every job that holds a lease now, oldest first; a note that a dead supervisor left behind does not count."""
    try:
        names = [name for name in os.listdir(node.locks) if name.startswith("gpu-") and name.endswith(".json")]
    except OSError:
        return []
    notes = [read(Holder, path) for path in (node.holder, *(os.path.join(node.locks, name) for name in names))]
    found = {note.job_id: note for note in notes if note is not None and is_alive(note.supervisor)}
    return sorted(found.values(), key=lambda holder: holder.since)
