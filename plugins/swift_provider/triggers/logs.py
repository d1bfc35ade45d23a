"""Log bytes of a node as lines: any chunking, any encoding, progress bars folded to their last state. Pure."""

from __future__ import annotations


class LogCursor:
    """Cuts a growing log into lines.

    ``offset`` counts bytes from the start of the file to the end of the last complete line: a position from which
    another cursor can go on without losing or repeating a byte.
    """

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self._pending = b""

    @property
    def read_offset(self) -> int:
        """Where the next bytes are to be read from."""
        return self.offset + len(self._pending)

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data``, read at :attr:`read_offset`, completes."""
        head, newline, rest = (self._pending + data).rpartition(b"\n")
        self._pending = rest
        if not newline:
            return []
        self.offset += len(head) + 1
        return [_fold(line) for line in head.split(b"\n")]

    def flush(self) -> list[str]:
        """The last line when the log has ended without a line break."""
        rest, self._pending = self._pending, b""
        self.offset += len(rest)
        return [_fold(rest)] if rest else []


def _fold(line: bytes) -> str:
    """A line as a terminal shows it in the end: what follows the last carriage return, undecodable bytes replaced."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", "replace")
