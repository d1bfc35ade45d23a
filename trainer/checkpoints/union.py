"""Checkpoints of a gang without a shared disk: each node holds a part, the union must be whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Mapping, Tuple

from trainer.checkpoints.completeness import step_of
from trainer.protocol import CheckpointListing, FileEntry


@dataclass(frozen=True)
class Union:
    """One checkpoint over all nodes. ``holders`` maps each path to the nodes that have its best copy, by name."""

    listing: CheckpointListing
    holders: Dict[str, List[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.listing.name


def merge(listings_by_node: Mapping[str, Iterable[CheckpointListing]]) -> List[Union]:
    """What all nodes hold together, one union a checkpoint, by step.

    Of copies that differ, a whole one beats a broken one and a bigger one a smaller one; equal ones have many holders.
    """
    parts: Dict[str, Dict[str, CheckpointListing]] = {}
    for node in sorted(listings_by_node):
        for listing in listings_by_node[node]:
            parts.setdefault(listing.name, {})[node] = listing
    return [_merge_one(name, parts[name]) for name in sorted(parts, key=lambda name: (step_of(name) or 0, name))]


def _merge_one(name: str, by_node: Mapping[str, CheckpointListing]) -> Union:
    best: Dict[str, FileEntry] = {}
    holders: Dict[str, List[str]] = {}
    for node, listing in by_node.items():
        for entry in listing.files:
            known = best.get(entry.path)
            if known is None or _worth(entry) > _worth(known):
                best[entry.path], holders[entry.path] = entry, [node]
            elif _worth(entry) == _worth(known):
                holders[entry.path].append(node)
    return Union(CheckpointListing(name, [best[path] for path in sorted(best)]), dict(sorted(holders.items())))


def _worth(entry: FileEntry) -> Tuple[bool, int]:
    return entry.header_ok is not False, entry.size
