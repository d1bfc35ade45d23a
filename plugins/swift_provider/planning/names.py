"""Names that follow from a run and from nothing else, so that whoever starts it again arrives at the same ones."""

from __future__ import annotations

import hashlib
import json
import re


def digest(*parts: object) -> str:
    """Twelve hexadecimal digits that stand for ``parts``, whatever characters they hold."""
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:12]


def safe_name(text: str, limit: int = 80) -> str:
    """``text`` as one path component or key part: itself if it is harmless, else a readable form and a digest."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:limit]
    return cleaned if cleaned == text else f"{cleaned or 'run'}-{digest(text)[:6]}"


def run_key(dag_id: str, run_id: str) -> str:
    """The folder of a run on a node."""
    return f"{safe_name(dag_id, 60)}.{safe_name(run_id, 60)}"


def job_id(dag_id: str, run_id: str, task_id: str, map_index: int, generation: int) -> str:
    """The id of the jobs of one generation of a run, equal on all its nodes: a pure function of the run's identity.

    The readable part is for people; the digest alone makes it unique.
    """
    return f"{safe_name(dag_id, 40)}.{digest(dag_id, run_id, task_id, map_index)}.g{generation}"
