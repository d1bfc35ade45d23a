"""A piece of a file as the body of a request: read once, summed up and counted while it is sent."""

from __future__ import annotations

import os
from typing import Callable, Iterator

from trainer.store import crc64
from trainer.store.client import StoreError
from trainer.store.pace import Pace

_BLOCK = 1 << 20  # bytes; what a sender needs of memory, whatever the size of file or part


class CancelledError(StoreError):
    """The transfer was told to stop; what is done so far is noted."""


class Body:
    """A piece of a file as the body of a request, read and summed up block by block while it is sent."""

    def __init__(self, descriptor: int, offset: int, length: int, pace: Pace, cancelled: Callable[[], bool]) -> None:
        self._descriptor, self._offset, self._length, self._pace = descriptor, offset, length, pace
        self._cancelled = cancelled
        self.crc, self.taken = 0, 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[memoryview]:
        self.give_back()
        buffer = memoryview(bytearray(min(_BLOCK, self._length)))
        while self.taken < self._length:
            if self._cancelled():
                raise CancelledError("the transfer was told to stop")
            wanted = min(len(buffer), self._length - self.taken)
            count = os.preadv(self._descriptor, [buffer[:wanted]], self._offset + self.taken)
            if not count:
                raise StoreError("the file became shorter while it was sent")
            self.crc = crc64.update(self.crc, buffer[:count])
            self.taken += count
            self._pace.take(count)
            yield buffer[:count]

    def give_back(self) -> None:
        """Count as not sent what is to be sent again."""
        self._pace.skip(-self.taken)
        self.crc, self.taken = 0, 0
