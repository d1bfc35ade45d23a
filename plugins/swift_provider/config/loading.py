"""Reads recipe and cluster files: YAML with line numbers, ``${VARIABLE}`` in values, all faults at once."""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from swift_provider.config.cluster import Cluster
from swift_provider.config.errors import ConfigError, Fault, from_validation_error, key_text, nearest
from swift_provider.config.recipe import Recipe

M = TypeVar("M", bound=BaseModel)
KeyPath = tuple[str | int, ...]

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


def list_recipes(config_dir: Path) -> list[str]:
    """The names of the recipe files, without ``.yaml``, sorted."""
    return sorted(path.stem for path in (config_dir / "recipes").glob("*.yaml"))


def list_clusters(config_dir: Path) -> list[str]:
    """The names of the cluster files, without ``.yaml``, sorted."""
    return sorted(path.stem for path in (config_dir / "clusters").glob("*.yaml"))


def load_recipe(name: str, config_dir: Path) -> Recipe:
    """The recipe ``recipes/<name>.yaml``.

    Raises:
        ConfigError: there is no such file, or something in it is wrong; all faults at once.
    """
    return _load(Recipe, "recipes", name, config_dir)


def load_cluster(name: str, config_dir: Path) -> Cluster:
    """The cluster ``clusters/<name>.yaml``.

    Raises:
        ConfigError: there is no such file, or something in it is wrong; all faults at once.
    """
    return _load(Cluster, "clusters", name, config_dir)


def _load(model: type[M], folder: str, name: str, config_dir: Path) -> M:
    path = config_dir / folder / f"{name}.yaml"
    shown = f"{folder}/{name}.yaml"
    if Path(name).name != name or not path.is_file():
        there = sorted(found.stem for found in (config_dir / folder).glob("*.yaml"))
        guess = nearest(name, there)
        hint = f"did you mean {guess!r}?" if guess else f"there are: {', '.join(there) or 'none'}"
        raise ConfigError([Fault(shown, "", f"no such file in {config_dir / folder}; {hint}")])
    return parse(model, path.read_text(encoding="utf-8"), shown, os.environ, path.parent)


def parse(model: type[M], text: str, shown: str, environment: Mapping[str, str], folder: Path | None = None) -> M:
    """``model`` from the text of a YAML file.

    Args:
        model: the class of the whole file.
        text: the file's content.
        shown: the file's name in messages.
        environment: where ``${NAME}`` and ``${NAME:-default}`` in string values are looked up.
        folder: where relative paths in the file begin; default: the current folder.

    Raises:
        ConfigError: with every fault.
    """
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 0
        raise ConfigError([Fault(shown, "", f"is not YAML: {getattr(error, 'problem', error)}", line)]) from None
    lines: dict[KeyPath, int] = {}
    faults: list[Fault] = []
    if tree is not None:
        _index(tree, (), lines, faults, shown)
    if not isinstance(value, dict):
        raise ConfigError([Fault(shown, "", f"must be a mapping of keys, is {type(value).__name__}", 1)])
    substitution = _Substitution(environment, shown, lines)
    value = substitution.apply(value)
    faults += substitution.faults
    try:
        parsed = model.model_validate(value, context={"folder": folder})
    except ValidationError as error:
        faults += from_validation_error(error, shown, lines, _known_keys(model))
        raise ConfigError(_without_cascades(faults)) from None
    if faults:
        raise ConfigError(faults)
    return parsed


def _without_cascades(faults: list[Fault]) -> list[Fault]:
    """Faults in file order, without the model's complaint about a key that has already been named."""
    seen: set[str] = set()
    kept = []
    for fault in faults:
        if fault.key not in seen:
            kept.append(fault)
        seen.add(fault.key)
    return sorted(kept, key=lambda fault: fault.line or 10**9)


def _index(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], faults: list[Fault], shown: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            below = (*path, str(key_node.value))
            line = key_node.start_mark.line + 1
            if below in lines:
                faults.append(Fault(shown, key_text(below), f"is there twice (first in line {lines[below]})", line))
            lines[below] = line
            _index(value_node, below, lines, faults, shown)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            _index(item, (*path, index), lines, faults, shown)


class _Substitution:
    """Replaces ``${NAME}`` and ``${NAME:-default}`` in all string values of a file, collecting what is not set."""

    def __init__(self, environment: Mapping[str, str], shown: str, lines: Mapping[KeyPath, int]) -> None:
        self.environment, self.shown, self.lines = environment, shown, lines
        self.faults: list[Fault] = []

    def apply(self, value: Any, path: KeyPath = ()) -> Any:
        if isinstance(value, dict):
            return {key: self.apply(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, list):
            return [self.apply(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, str):
            return _VARIABLE.sub(lambda match: self._look_up(match, path), value)
        return value

    def _look_up(self, match: re.Match[str], path: KeyPath) -> str:
        name = match["name"]
        found = self.environment.get(name, match["default"])
        if found is not None:
            return found
        problem = f"environment variable {name} is not set where Airflow runs; set it, or write ${{{name}:-default}}"
        self.faults.append(Fault(self.shown, key_text(path), problem, self.lines.get(path, 0)))
        return match[0]


def _known_keys(model: type[BaseModel], path: KeyPath = ()) -> dict[KeyPath, list[str]]:
    known: dict[KeyPath, list[str]] = {path: list(model.model_fields)}
    for name, field in model.model_fields.items():
        inner, is_list = _model_of(field.annotation)
        if inner is not None:
            for index in range(64) if is_list else [None]:
                below = (*path, name) if index is None else (*path, name, index)
                known.update(_known_keys(inner, below))
    return known


def _model_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return _model_of(arguments[0])[0], True
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            inner, is_list = _model_of(argument)
            if inner is not None:
                return inner, is_list
    return None, False
