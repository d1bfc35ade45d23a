"""Parameters of a run as a command line gives them: ``--param max_steps=10``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from swift_provider.config import ConfigError, Fault, Recipe
from swift_provider.planning.params import RunParam, params_of


def parse_params(texts: Iterable[str], recipe: Recipe) -> dict[str, Any]:
    """The values, typed as the trigger form types them.

    Raises:
        ConfigError: a text is not ``name=value``, or a value is of another type; all of them at once.
    """
    known = {param.name: param for param in params_of(recipe)}
    params: dict[str, Any] = {}
    faults = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            faults.append(Fault("--param", text, "write name=value"))
            continue
        try:
            params[name] = _typed(known.get(name), value)
        except ValueError as error:
            faults.append(Fault("--param", name, f"{error} (got {value!r})"))
    if faults:
        raise ConfigError(faults)
    return params


def _typed(param: RunParam | None, text: str) -> Any:
    types = param.schema["type"] if param else "string"
    kinds = {types} if isinstance(types, str) else set(types)
    if text in ("", "null") and "null" in kinds:
        return None
    if "array" in kinds:
        return (
            _json(text, list, "a JSON list") if text.startswith("[") else text.split(",") if "@" not in text else [text]
        )
    if "object" in kinds:
        return _json(text, dict, 'a JSON object such as {"seed": 1}')
    if "boolean" in kinds:
        if text.lower() not in ("true", "false"):
            raise ValueError("must be true or false")
        return text.lower() == "true"
    if "integer" in kinds or "number" in kinds:
        return _limited(param, _number(text, whole="integer" in kinds))
    if param and "enum" in param.schema and text not in param.schema["enum"]:
        raise ValueError("must be one of " + ", ".join(str(choice) for choice in param.schema["enum"] if choice))
    return text


def _number(text: str, whole: bool) -> int | float:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise ValueError("must be a whole number" if whole else "must be a number") from None


def _limited(param: RunParam | None, value: int | float) -> int | float:
    schema = param.schema if param else {}
    if "minimum" in schema and value < schema["minimum"]:
        raise ValueError(f"must be {schema['minimum']} or more")
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        raise ValueError(f"must be more than {schema['exclusiveMinimum']}")
    if "maximum" in schema and value > schema["maximum"]:
        raise ValueError(f"must be {schema['maximum']} or less")
    return value


def _json(text: str, kind: type[Any], wanted: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise ValueError(f"must be {wanted}")
    return value
