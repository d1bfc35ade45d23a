"""The container that a training runs in, where the nodes have no training environment of their own."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from swift_provider.config.values import AbsolutePath, StrictModel

_MOUNT = re.compile(r"(?P<source>/[^:,]*)(?::(?P<target>/[^:,]*))?(?::(?P<mode>ro|rw))?")


class Docker(StrictModel):
    """One container per node, started by the same agent: ``docker run --rm --init --network host …``."""

    image: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][^\s]*$", description="image, best with a digest")
    mounts: list[str] = Field(default_factory=list, description="folders as host, host:container or host:container:ro")
    shm_size: str | None = Field(
        default=None,
        pattern=r"^[0-9]+[bkmgBKMG]?$",
        description="size of a /dev/shm of its own, such as 64g; without it the container shares the host's",
    )
    devices: list[AbsolutePath] = Field(default_factory=list, description="devices, such as /dev/infiniband")
    ulimits: dict[str, str] = Field(default_factory=dict, description="beyond memlock=-1 and stack=67108864")
    user: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.:-]+$", description="user, as docker run --user")
    program: str = Field(default="docker", pattern=r"^[^\s-]\S*$", description="the docker command on the nodes")
    agent_python: AbsolutePath = Field(
        default="/usr/bin/python3", description="interpreter of the agent, outside the container, on each node"
    )

    @field_validator("mounts")
    @classmethod
    def _check_mounts(cls, mounts: list[str]) -> list[str]:
        for mount in mounts:
            if not _MOUNT.fullmatch(mount):
                raise ValueError(f"{mount!r} is no mount; write /host, /host:/container or /host:/container:ro")
        return mounts

    @field_validator("ulimits", mode="before")
    @classmethod
    def _text_values(cls, ulimits: object) -> object:
        if isinstance(ulimits, dict):
            return {name: str(value) if isinstance(value, int) else value for name, value in ulimits.items()}
        return ulimits

    @model_validator(mode="after")
    def _check_ulimits(self) -> Self:
        for name, value in self.ulimits.items():
            if not re.fullmatch(r"[a-z]+", name) or not re.fullmatch(r"-?\d+(:-?\d+)?", value):
                raise ValueError(f"ulimits: {name}={value} is none; write e.g. nofile: 1048576:1048576")
        return self

    def binds(self) -> list[tuple[str, str, bool]]:
        """The mounts as ``(host, container, read only)``."""
        parsed = [match for match in map(_MOUNT.fullmatch, self.mounts) if match]
        return [(match["source"], match["target"] or match["source"], match["mode"] == "ro") for match in parsed]
