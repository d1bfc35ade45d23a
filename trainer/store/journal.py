"""What of an unfinished transfer is done already: a file of JSON lines, appended to, so that a kill costs one part."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from typing import Any, Dict, List, Optional

from trainer.files import PRIVATE_FOLDER, append, read_bytes, remove_quietly, write_atomic


class Journal:
    """The journal of one transfer.

    The first line says what is transferred (``head``), each further line one part that is done. A journal whose head
    is another one is no journal of this transfer. The last line may be torn: it then does not count.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def of_upload(cls, state_dir: str, bucket: str, key: str) -> Journal:
        """The journal of the upload of one object, kept below ``state_dir``."""
        name = hashlib.sha256(f"{bucket}/{key}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return cls(os.path.join(state_dir, "uploads", f"{name}.jsonl"))

    def head(self) -> Optional[Dict[str, Any]]:
        """The first line; ``None`` when there is no journal that can be read."""
        lines = self._lines()
        return lines[0] if lines and isinstance(lines[0], dict) else None

    def parts(self) -> Dict[int, List[Any]]:
        """Part number → what was noted of it."""
        rows = [row for row in self._lines()[1:] if isinstance(row, list) and row and isinstance(row[0], int)]
        return {row[0]: row[1:] for row in rows}

    def begin(self, head: Dict[str, Any]) -> None:
        """Start anew; what was noted is gone."""
        os.makedirs(os.path.dirname(self.path), mode=PRIVATE_FOLDER, exist_ok=True)
        write_atomic(self.path, (json.dumps(head) + "\n").encode())

    def note(self, number: int, *facts: Any) -> None:
        """Note that a part is done."""
        append(self.path, ("\n" + json.dumps([number, *facts])).encode())

    def end(self) -> None:
        """Remove it: the transfer is done, or nothing of it can be used."""
        remove_quietly(self.path)

    def _lines(self) -> List[Any]:
        rows: List[Any] = []
        for line in (read_bytes(self.path) or b"").splitlines():
            if line.strip():
                row: Any = None
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                rows.append(row)
        return rows
