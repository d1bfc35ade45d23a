"""Placeholder."""

from typing import List


class CheckpointWatch:
    """Placeholder."""

    def __init__(self, output_dir: str) -> None:
        self._output_dir = output_dir

    def poll(self) -> List[str]:
        """Nothing yet."""
        return []
