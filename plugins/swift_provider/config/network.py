"""The network between the nodes, in one word and a few details, and the NCCL variables that it stands for."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from swift_provider.config.values import StrictModel


class Network(StrictModel):
    """What the ranks talk over. Whatever ``env`` of the cluster or of the recipe says wins over these."""

    kind: Literal["ethernet", "roce", "infiniband"]
    interface: str | None = Field(default=None, min_length=1, description="network interface, such as eth0 or bond0")
    hca: str | list[str] | None = Field(
        default=None, min_length=1, description="RDMA adapters, such as mlx5_0, as NCCL_IB_HCA takes them"
    )
    gid_index: int | None = Field(default=None, ge=0, description="RoCE: which GID; show_gids lists them")
    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = Field(default=None, description="NCCL_DEBUG")

    @model_validator(mode="before")
    @classmethod
    def _one_word(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.kind == "ethernet" and self.hca is not None:
            raise ValueError("hca: ethernet uses no RDMA adapter; leave it out, or write kind: roce")
        if self.kind != "roce" and self.gid_index is not None:
            raise ValueError("gid_index: only roce has one; leave it out")
        return self

    def environment(self) -> dict[str, str]:
        """The variables of every rank."""
        hca = ",".join(self.hca) if isinstance(self.hca, list) else self.hca
        values = {
            "NCCL_IB_DISABLE": "1" if self.kind == "ethernet" else "0",
            "NCCL_SOCKET_IFNAME": self.interface,
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_IB_HCA": hca,
            "NCCL_IB_GID_INDEX": None if self.gid_index is None else str(self.gid_index),
            "NCCL_DEBUG": self.debug,
        }
        return {name: value for name, value in values.items() if value is not None}
