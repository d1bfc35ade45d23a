"""Which checkpoint in the bucket is meant: ``latest``, ``best``, or a name. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swift_provider.config.checkpoints import KeepBest
from swift_provider.config.errors import nearest
from swift_provider.planning.retention import created_at
from trainer.protocol import Manifest, Verdict
from trainer.retention import Candidate
from trainer.store import Folder

LATEST, BEST = "latest", "best"


@dataclass(frozen=True)
class Stored:
    """A checkpoint that exists: its manifest and where it lies. ``created`` is in seconds since the epoch."""

    prefix: str
    manifest: Manifest
    pinned: bool
    created: float
    lacking: dict[str, str] = field(default_factory=dict)

    @property
    def run(self) -> str:
        """The run's folder in the bucket, without what is above it."""
        return self.prefix.split("/")[-2] if "/" in self.prefix else ""

    @property
    def name(self) -> str:
        """What a person calls it: run and checkpoint."""
        return f"{self.run}/{self.manifest.name}" if self.run else self.manifest.name


def existing(folders: Iterable[Folder], recipe: str = "") -> list[Stored]:
    """What has a manifest, oldest first; with ``recipe`` only that recipe's."""
    found = [
        Stored(folder.prefix, folder.manifest, folder.pinned, created_at(folder.manifest) or 0.0, folder.lacking())
        for folder in folders
        if folder.manifest is not None and recipe in ("", folder.manifest.recipe)
    ]
    return sorted(found, key=lambda item: (item.created, item.run, item.manifest.step))


def choose(stored: list[Stored], wanted: str, best: KeepBest | None = None) -> Stored:
    """The one that ``wanted`` means.

    Args:
        stored: what exists, oldest first.
        wanted: ``latest`` (the newest that training can resume from), ``best``, ``checkpoint-8`` where one run has it,
            ``<run>/checkpoint-8``, or more of its place, up to ``oss://bucket/…``.
        best: what counts as the best.

    Raises:
        ValueError: nothing, or more than one thing, is meant; the message says what there is.
    """
    if not stored:
        raise ValueError("there is no checkpoint: nothing here has a manifest")
    if wanted == LATEST:
        resumable = [item for item in stored if item.manifest.verdict == Verdict.COMPLETE and not item.lacking]
        if not resumable:
            raise ValueError("no checkpoint here is whole and has optimizer state; name one")
        return max(resumable, key=lambda item: (item.created, item.manifest.step))
    if wanted == BEST:
        return _best(stored, best)
    short = wanted.partition("://")[2].partition("/")[2] if "://" in wanted else wanted
    found = [item for item in stored if f"/{item.prefix}".endswith(f"/{short.strip('/')}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{wanted} is there {len(found)} times: name one of {', '.join(i.name for i in found[-8:])}")
    names = [item.name for item in stored]
    guess = nearest(wanted, [*names, LATEST, BEST])
    raise ValueError(f"no checkpoint {wanted!r}; " + (f"did you mean {guess}?" if guess else f"newest: {names[-1]}"))


def _best(stored: list[Stored], best: KeepBest | None) -> Stored:
    if best is None:
        raise ValueError("best: the recipe has no checkpoints.keep_best that says by which metric")
    scored = []
    for item in stored:
        score = Candidate("", 0, metrics=item.manifest.metrics).score(best.metric)
        if score is not None and not item.lacking:
            scored.append((score if best.mode == "min" else -score, -item.created, item.prefix, item))
    if not scored:
        raise ValueError(f"best: no manifest here has a number for {best.metric}")
    return min(scored, key=lambda row: row[:-1])[-1]
