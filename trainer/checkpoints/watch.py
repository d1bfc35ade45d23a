"""Which checkpoints are complete, asked once a second without reading each of them once a second."""

from __future__ import annotations

import os
import time
from typing import Dict, List, Set, Tuple

from trainer.checkpoints.completeness import judge
from trainer.checkpoints.scan import checkpoint_names, link_target, scan_checkpoint
from trainer.protocol import Verdict

AGAIN_S = 10.0  # between two looks at checkpoints that are not complete while nothing else changes


class CheckpointWatch:
    """Follows the checkpoint folders of one output folder, as this node alone sees them.

    A folder is read when the set of folders, a folder's own time or the ``last-checkpoint`` link changes, and every ten
    seconds while it is incomplete. One that is complete is not read again unless its time changes.
    """

    def __init__(self, output_dir: str) -> None:
        self._output_dir = output_dir
        self._complete: Dict[str, float] = {}
        self._seen: Tuple[object, ...] = ()
        self._next = 0.0

    def poll(self) -> List[str]:
        """The names of the complete checkpoints, oldest first."""
        if not self._output_dir:
            return []
        names = checkpoint_names(self._output_dir)
        times = {name: self._time(name) for name in names}
        seen = (tuple(times.items()), link_target(self._output_dir, "last-checkpoint"))
        pending = {name for name in names if self._complete.get(name) != times[name]}
        if seen != self._seen or (pending and time.monotonic() >= self._next):
            self._seen, self._next = seen, time.monotonic() + AGAIN_S
            self._look(pending, times)
        return [name for name in names if name in self._complete]

    def _time(self, name: str) -> float:
        try:
            return os.stat(os.path.join(self._output_dir, name)).st_mtime
        except OSError:
            return 0.0

    def _look(self, pending: Set[str], times: Dict[str, float]) -> None:
        self._complete = {name: at for name, at in self._complete.items() if name in times}
        for name in pending:
            self._complete.pop(name, None)
            listing = scan_checkpoint(os.path.join(self._output_dir, name))
            if listing is not None and judge(listing).verdict == Verdict.COMPLETE:
                self._complete[name] = times[name]
