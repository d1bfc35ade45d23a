"""PyTorch's distributed checkpoints: a folder of ``__<rank>_<n>.distcp`` files and ``.metadata``, written last.

``.metadata`` holds the names of all files that belong to it; the scan reads them out, so each is asked for by name.
"""

from __future__ import annotations

from typing import List

from trainer.checkpoints.judgement import Files, Finding

FILE = r"__\d+_\d+\.distcp"


def check(files: Files, folder: str) -> List[Finding]:
    """What is missing or broken in the distributed checkpoint ``folder``."""
    metadata = f"{folder}/.metadata"
    found = files.need(metadata)
    if found:
        return found
    names = (files.text(metadata) or "").split()
    if not names:
        return [Finding(f"{metadata} names no files", damaged=True)]
    return files.need(*(f"{folder}/{name}" for name in names))
