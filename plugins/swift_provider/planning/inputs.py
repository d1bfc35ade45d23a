"""Which arguments name things that must be on the nodes before training starts, and what they become once there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

#: Arguments whose values are models, datasets or code.
INPUT_ARGUMENTS = (
    "model",
    "adapters",
    "ref_model",
    "reward_model",
    "mcore_model",
    "mcore_adapter",
    "mcore_ref_model",
    "dataset",
    "val_dataset",
    "cached_dataset",
    "cached_val_dataset",
    "external_plugins",
)
# ms-swift's ``path#count``: the count is not part of the location.
_LOCATION = re.compile(r"(?P<location>(?:oss://|/)[^#]+)(?P<count>#\d+)?")


def split_inputs(args: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The inputs of ``args``: ``(locations, hub ids)``, each in order of appearance, without repetition.

    Locations are absolute paths and ``oss://`` objects or prefixes; what lies in the job's folder is neither.
    """
    locations: dict[str, None] = {}
    hub_ids: dict[str, None] = {}
    for name in INPUT_ARGUMENTS:
        for value in _as_list(args.get(name)):
            match = _LOCATION.fullmatch(value)
            if match:
                locations[match["location"]] = None
            elif not value.startswith("{job_dir}/"):
                hub_ids[value] = None
    return list(locations), list(hub_ids)


def resolve_inputs(args: Mapping[str, Any], staged: Mapping[str, str]) -> dict[str, Any]:
    """``args`` with each staged location replaced by the path that it has on a node."""

    def resolve(value: str) -> str:
        match = _LOCATION.fullmatch(value)
        if match is None or match["location"] not in staged:
            return value
        return staged[match["location"]] + (match["count"] or "")

    return _map_inputs(args, resolve)


def _map_inputs(args: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    changed = dict(args)
    for name in INPUT_ARGUMENTS:
        value = args.get(name)
        if isinstance(value, str):
            changed[name] = change(value)
        elif isinstance(value, list):
            changed[name] = [change(str(item)) for item in value]
    return changed


def _as_list(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
