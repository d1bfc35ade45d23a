"""The agent as one file: a zipapp of this package, built in memory and named by its content."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import zipfile
from typing import Iterator, Tuple

_MAIN = b"""import os
import sys

archive = sys.path[0]
compiled = f"{archive}.{sys.implementation.cache_tag}-{sys.hexversion:x}"
if os.path.isfile(compiled):
    sys.path.insert(0, compiled)
else:
    from trainer.compiled import write_compiled

    write_compiled(archive, compiled)

from trainer.cli import main

sys.exit(main())
"""
_STAMP = (1980, 1, 1, 0, 0, 0)  # the oldest that a zip can hold: equal sources give equal bytes


@functools.lru_cache(maxsize=1)
def agent_bundle() -> Tuple[str, bytes]:
    """``(content hash, zipapp)``; run it as ``python -I <hash>.pyz VERB`` with any Python from 3.9 on.

    The hash is 16 hexadecimal digits of sha256 over the zipapp. The same sources always give the same bytes.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted([("__main__.py", _MAIN), *_sources()]):
            entry = zipfile.ZipInfo(name, _STAMP)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    data = buffer.getvalue()
    return hashlib.sha256(data).hexdigest()[:16], data


def _sources() -> Iterator[Tuple[str, bytes]]:
    root = os.path.dirname(os.path.abspath(__file__))
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("__pycache__", "tests")]
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                with open(path, "rb") as stream:
                    yield "trainer/" + os.path.relpath(path, root).replace(os.sep, "/"), stream.read()
