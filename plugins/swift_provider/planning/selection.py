"""Which nodes, and which of their GPUs, a run uses. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swift_provider.config.cluster import Cluster, Node
from swift_provider.config.errors import Fault, nearest, shorten
from swift_provider.config.hostfile import parse_selection

#: Node name → the slots of it that are meant, as GPU indexes.
_Slots = dict[str, set[int]]


def select_nodes(cluster: Cluster, include: Any = None, exclude: Any = None) -> tuple[list[Node], list[Fault]]:
    """The nodes of a run in the cluster's order, each with the slots and GPUs that the run uses, and what is wrong.

    Args:
        cluster: the nodes there are.
        include: names, labels or DeepSpeed's ``host:0,2@host2``, as a text or a list; nothing: all but the spares.
        exclude: the same, for what is not to be used. A node that is excluded as a whole is replaced by a spare of as
            many slots, if one is left.
    """
    faults: list[Fault] = []
    narrowed: set[str] = set()
    wanted = _resolve(cluster, include, "nodes", faults, narrowed)
    unwanted = _resolve(cluster, exclude, "exclude", faults, set())
    if not include:
        wanted = {node.name: set(_slots(node)) for node in cluster.nodes if not node.spare}
    if faults:
        return [node for node in cluster.nodes if not node.spare], faults
    left = {name: slots - unwanted.get(name, set()) for name, slots in wanted.items()}
    _fill_in(cluster, left, unwanted)
    chosen = [_narrow(node, left[node.name], node.name in narrowed) for node in cluster.nodes if left.get(node.name)]
    if not chosen:
        faults.append(Fault("run parameters", "exclude", f"leaves no node (got {shorten(exclude)}); exclude fewer"))
    return chosen, faults


def _resolve(cluster: Cluster, entries: Any, key: str, faults: list[Fault], narrowed: set[str]) -> _Slots:
    """The slots that are meant; the nodes of which some were named by number are added to ``narrowed``."""
    if not entries:
        return {}
    if not isinstance(entries, str) and not (
        isinstance(entries, Iterable) and all(isinstance(e, str) for e in entries)
    ):
        faults.append(Fault("run parameters", key, f"must be a list of names (got {shorten(entries)})"))
        return {}
    try:
        picks = parse_selection(entries)
    except ValueError as error:
        faults.append(Fault("run parameters", key, str(error)))
        return {}
    found: _Slots = {}
    for pick in picks:
        nodes = [node for node in cluster.nodes if pick.name == node.name or pick.name in node.labels]
        if not nodes:
            faults.append(Fault("run parameters", key, _no_node(cluster, pick.name)))
        for node in nodes:
            there = _slots(node)
            wrong = [slot for slot in pick.slots or () if slot not in there]
            if wrong:
                problem = f"{node.name} has no slot {', '.join(map(str, wrong))}; it has {', '.join(map(str, there))}"
                faults.append(Fault("run parameters", key, problem))
            if pick.slots is not None:
                narrowed.add(node.name)
            found.setdefault(node.name, set()).update(there if pick.slots is None else pick.slots)
    return found


def _no_node(cluster: Cluster, name: str) -> str:
    words = [node.name for node in cluster.nodes] + sorted({label for node in cluster.nodes for label in node.labels})
    guess = nearest(name, words)
    return f"no node {name!r}; " + (f"did you mean {guess!r}?" if guess else f"the cluster has {', '.join(words)}")


def _slots(node: Node) -> list[int]:
    """The slots of a node, named by GPU index."""
    return list(range(node.slots)) if node.gpus is None else list(node.gpus)


def _fill_in(cluster: Cluster, left: _Slots, unwanted: _Slots) -> None:
    """A spare in place of each node that is excluded as a whole."""
    by_name = {node.name: node for node in cluster.nodes}
    for name in [name for name, slots in left.items() if not slots]:
        size = by_name[name].slots
        spare = next(
            (
                node
                for node in cluster.nodes
                if node.spare and node.name not in left and node.name not in unwanted and node.slots == size
            ),
            None,
        )
        if spare is not None:
            left[spare.name] = set(_slots(spare))


def _narrow(node: Node, slots: set[int], named: bool) -> Node:
    """``node`` with these slots alone. Slots that were ``named`` are leased by GPU, even if they are all there are."""
    if not named and slots == set(_slots(node)):
        return node
    return node.model_copy(update={"gpus": sorted(slots), "slots": len(slots)})
