"""The recipe's section ``checkpoints``: where they go, how they are stored, and which ones stay."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from swift_provider.config.values import OssPrefix, Seconds, StrictModel


class KeepBest(StrictModel):
    """Which checkpoints of a run count as the best: those with the smallest or greatest values of a metric."""

    metric: str = Field(min_length=1)
    mode: Literal["min", "max"] = "min"
    count: int = Field(default=1, ge=1, description="how many of them stay")


class Retention(StrictModel):
    """Which checkpoints stay; one that any rule wants does, until ``max_gib`` takes it again."""

    keep_last: int = Field(default=3, ge=1, description="newest checkpoints of a run")
    keep_best: KeepBest | None = None
    keep_runs: int | None = Field(default=None, ge=1, description="the rules above count within so many newest runs")
    keep_every: int | None = Field(default=None, ge=1, description="those of a run whose step is a multiple of it")
    keep_daily: int = Field(default=0, ge=0, description="the first of each of so many days, over all runs")
    keep_weekly: int = Field(default=0, ge=0, description="the first of each of so many weeks, over all runs")
    keep_monthly: int = Field(default=0, ge=0, description="the first of each of so many months, over all runs")
    keep_within: Seconds = Field(default=0.0, ge=0, description="those that are younger, over all runs")
    max_gib: float | None = Field(default=None, gt=0, description="what all together may take; the oldest go first")


class RetentionChange(StrictModel):
    """What of :class:`Retention` is other on the nodes, or in the bucket; what is left out stays as it is."""

    keep_last: int | None = Field(default=None, ge=1)
    keep_best: KeepBest | None = None
    keep_runs: int | None = Field(default=None, ge=1)
    keep_every: int | None = Field(default=None, ge=1)
    keep_daily: int | None = Field(default=None, ge=0)
    keep_weekly: int | None = Field(default=None, ge=0)
    keep_monthly: int | None = Field(default=None, ge=0)
    keep_within: Seconds | None = Field(default=None, ge=0)
    max_gib: float | None = Field(default=None, gt=0)


class Storage(StrictModel):
    """How objects are written. Nothing is sent for what is left out: the bucket's own defaults hold."""

    encryption: Literal["AES256", "KMS", "SM4"] | None = Field(
        default=None, description="server-side encryption of each object"
    )
    kms_key_id: str | None = Field(default=None, min_length=1, description="key of KMS; default: the account's own")
    storage_class: Literal["Standard", "IA"] | None = Field(
        default=None, description="classes that must be thawed first would make a resume wait for hours"
    )
    tags: dict[str, str] = Field(default_factory=dict, description="at most ten, for lifecycle rules and bills")

    @field_validator("tags", mode="before")
    @classmethod
    def _text_values(cls, tags: Any) -> Any:
        if isinstance(tags, dict):
            return {key: str(value) if isinstance(value, (int, float)) else value for key, value in tags.items()}
        return tags

    @field_validator("tags")
    @classmethod
    def _check_tags(cls, tags: dict[str, str]) -> dict[str, str]:
        if len(tags) > 10:
            raise ValueError(f"are {len(tags)}; OSS takes at most 10")
        long = [key for key, value in tags.items() if not 1 <= len(key) <= 128 or len(value) > 256]
        if long:
            raise ValueError(f"{', '.join(long)}: a key has 1 to 128 characters, a value at most 256")
        return tags

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if self.kms_key_id and self.encryption != "KMS":
            raise ValueError("kms_key_id needs encryption: KMS")
        return self


class Destination(StrictModel):
    """Where checkpoints go."""

    backup: OssPrefix | None = Field(default=None, description="oss://bucket/prefix; without it nothing is mirrored")
    oss_conn_id: str = Field(default="oss_default", description="Airflow connection of type oss")
    storage: Storage = Field(default_factory=Storage)
    upload_while_training: bool = Field(
        default=True, description="send each checkpoint as soon as it is complete; else the backup task sends them all"
    )
    upload_bandwidth: int | None = Field(
        default=None, ge=1, description="bytes per second and node that uploads may take; default: what there is"
    )


class CheckpointPolicy(Retention, Destination):
    """Where checkpoints go and which ones stay."""

    nodes: RetentionChange | None = Field(default=None, description="what is other on the nodes")
    bucket: RetentionChange | None = Field(default=None, description="what is other in the bucket")

    def retention(self, where: Literal["nodes", "bucket"]) -> Retention:
        """The rules for one place: those of this section, with that place's own over them."""
        change = self.nodes if where == "nodes" else self.bucket
        rules = {name: getattr(self, name) for name in Retention.model_fields}
        own = {name: getattr(change, name) for name in Retention.model_fields} if change else {}
        return Retention.model_validate(rules | {name: value for name, value in own.items() if value is not None})

    def with_keep_last(self, count: int) -> Self:
        """The same with another ``keep_last``, in both places."""
        places = {name: change for name in ("nodes", "bucket") if (change := getattr(self, name)) is not None}
        others = {name: change.model_copy(update={"keep_last": None}) for name, change in places.items()}
        return self.model_copy(update={"keep_last": count, **others})
