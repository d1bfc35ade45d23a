"""Kinds of values that the YAML files share: names, durations, absolute paths, bucket locations."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class StrictModel(BaseModel):
    """A section of a file: unknown keys are faults, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=False)


def parse_duration(value: Any) -> Any:
    """``90``, ``"90s"``, ``"10m"`` or ``"1d 2h"`` as seconds; anything else is left for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    parts = list(_DURATION.finditer(value))
    if not parts or _DURATION.sub("", value).strip():
        raise ValueError("is not a duration; write seconds (90) or units (90s, 10m, 2h, 1d 12h)")
    return sum(float(part["number"]) * _SECONDS[part["unit"]] for part in parts)


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("is not an absolute path; write it from / on")
    return value.rstrip("/") or "/"


def _name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise ValueError("is not a name; use letters, digits, '.', '_' and '-', beginning with a letter or digit")
    return value


def split_oss(value: str) -> tuple[str, str]:
    """``oss://bucket/prefix`` as ``(bucket, prefix)``.

    Raises:
        ValueError: it does not begin with ``oss://`` or names no bucket.
    """
    match = re.fullmatch(r"oss://(?P<bucket>[a-z0-9][a-z0-9-]{1,61}[a-z0-9])(?:/(?P<key>.*))?", value)
    if match is None:
        raise ValueError("is not a bucket location; write oss://bucket/prefix (bucket: 3 to 63 of a-z, 0-9 and '-')")
    return match["bucket"], match["key"] or ""


def _oss_prefix(value: str) -> str:
    split_oss(value)
    return value.rstrip("/")


Seconds = Annotated[float, BeforeValidator(parse_duration)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Name = Annotated[str, AfterValidator(_name)]
OssPrefix = Annotated[str, AfterValidator(_oss_prefix)]
