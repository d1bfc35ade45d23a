"""Any sequence of saves, uploads, crashes, losses, pins and prunes, over several runs: what must be there afterwards.

Nodes and bucket are simulated in their smallest steps, so that a crash can come between any two of them; what decides
is the real thing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.trainer.test_retention_rules import POLICIES
from trainer.protocol import Verdict
from trainer.retention import Candidate, decide

FILES = frozenset({"model", "optimizer", "state"})
Key = tuple[str, int]


@dataclass
class Place:
    """Files of checkpoints; in the bucket the manifest is one of them."""

    files: dict[Key, set[str]] = field(default_factory=dict)

    def put(self, key: Key, *names: str) -> None:
        self.files.setdefault(key, set()).update(names)

    def drop(self, key: Key, name: str) -> None:
        self.files[key].discard(name)
        if not self.files[key]:
            del self.files[key]

    def whole(self, key: Key) -> bool:
        return self.files.get(key, set()) >= FILES


class Checkpoints(RuleBasedStateMachine):
    """One recipe's runs, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.bucket = Place(), Place()
        self.pinned: set[Key] = set()
        self.metrics: dict[Key, float] = {}
        self.finished: list[Key] = []  # in the order in which they became whole
        self.harmed: set[Key] = set()  # somebody else deleted something of it in the bucket
        self.run, self.step, self.now = 0, 0, 1.0e9

    def candidates(self, place: Place) -> list[Candidate]:
        found = []
        for key in place.files:
            if place is self.bucket and "manifest" not in place.files[key]:
                continue  # it does not exist
            item = Candidate(
                f"checkpoint-{key[1]}",
                key[1],
                Verdict.COMPLETE if place.whole(key) else Verdict.INCOMPLETE,
                {"eval_loss": self.metrics[key]} if key in self.metrics else {},
                pinned=key in self.pinned,
                verified=self.proven(key),
                run=key[0],
                created=1.0e9 + int(key[0]) * 86400 + key[1],
                size=10,
            )
            found.append(item)
        return found

    def proven(self, key: Key) -> bool:
        return self.bucket.whole(key) and "manifest" in self.bucket.files[key]

    # -- what happens -----------------------------------------------------------------------------------------------

    @rule()
    def begin_a_run(self) -> None:
        self.run, self.step, self.now = self.run + 1, 0, self.now + 86400

    @rule(files=st.integers(1, 3), metric=st.none() | st.floats(allow_nan=True))
    def save(self, files: int, metric: float | None) -> None:
        """A checkpoint is written; with fewer than all files the training was killed while it wrote."""
        self.step, self.now = self.step + 1, self.now + 60
        key = (str(self.run), self.step)
        self.nodes.put(key, *sorted(FILES)[:files])
        if metric is not None:
            self.metrics[key] = metric
        if self.nodes.whole(key):
            self.finished.append(key)

    @rule(crash=st.integers(0, 4), data=st.data())
    def back_up(self, crash: int, data: st.DataObject) -> None:
        """Each whole one goes file by file, the manifest last; ``crash`` ends it after so many steps."""
        whole = [key for key in self.nodes.files if self.nodes.whole(key) and not self.proven(key)]
        if whole:
            key = data.draw(st.sampled_from(sorted(whole)))
            if "manifest" not in self.bucket.files.get(key, set()):
                for name in [*sorted(FILES), "manifest"][:crash]:
                    self.bucket.put(key, name)

    @precondition(lambda self: self.bucket.files)
    @rule(data=st.data())
    def lose_an_object(self, data: st.DataObject) -> None:
        """Somebody deletes by hand, or a lifecycle rule does."""
        key = data.draw(st.sampled_from(sorted(self.bucket.files)))
        self.bucket.drop(key, data.draw(st.sampled_from(sorted(self.bucket.files[key]))))
        self.harmed.add(key)

    @precondition(lambda self: any(self.proven(key) for key in self.bucket.files))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(key for key in self.bucket.files if self.proven(key))))
        self.pinned.add(key)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.pinned.discard(data.draw(st.sampled_from(sorted(self.pinned))))

    @rule(policy=POLICIES, crash=st.integers(0, 40))
    def prune(self, policy, crash: int) -> None:
        """Nodes with a backup, then the bucket, manifest first; ``crash`` ends it after so many deletions."""
        on_nodes, in_bucket = replace(policy, backup=True), replace(policy, backup=False)
        steps = []
        for decision in decide(self.candidates(self.nodes), on_nodes, self.now, str(self.run)):
            if not decision.keep:
                key = (decision.run, decision.step)
                if self.nodes.whole(key):
                    assert self.proven(key), "deleted from the nodes and not in the bucket"
                steps += [(self.nodes, key, name) for name in sorted(self.nodes.files[key])]
        for decision in decide(self.candidates(self.bucket), in_bucket, self.now, str(self.run)):
            if not decision.keep:
                key = (decision.run, decision.step)
                rest = sorted(self.bucket.files[key] - {"manifest"})
                steps += [(self.bucket, key, name) for name in ["manifest", *rest]]
        for place, key, name in steps[:crash]:
            place.drop(key, name)

    # -- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def the_newest_whole_one_is_somewhere(self) -> None:
        if self.finished:
            assert self.nodes.whole(self.finished[-1])

    @invariant()
    def the_newest_of_this_run_can_be_resumed_from(self) -> None:
        own = [key for key in self.finished if key[0] == str(self.run)]
        assert not own or self.nodes.whole(own[-1])

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        assert all(self.proven(key) for key in self.pinned - self.harmed)

    @invariant()
    def a_manifest_never_speaks_of_what_we_deleted(self) -> None:
        for key, names in self.bucket.files.items():
            assert key in self.harmed or "manifest" not in names or self.bucket.whole(key)


TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
