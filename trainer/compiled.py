"""The agent's second file: the same modules compiled, since a zipapp is compiled anew at each of its starts."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import marshal
import zipfile

from trainer.files import write_atomic

_UNCHECKED = (1).to_bytes(4, "little") + bytes(8)  # PEP 552: by hash, which nobody compares; the name has it already


def write_compiled(archive: str, target: str) -> None:
    """Write the modules of the zip file ``archive`` as byte code of this Python to the zip file ``target``.

    It is on the disk as a whole or not at all. Where it cannot be written, the agent works from its sources.
    """
    buffer = io.BytesIO()
    with contextlib.suppress(OSError, zipfile.BadZipFile):
        with zipfile.ZipFile(archive) as sources, zipfile.ZipFile(buffer, "w") as compiled:
            for name in sources.namelist():
                if name.startswith("trainer/"):
                    code = compile(sources.read(name), f"{archive}/{name}", "exec", dont_inherit=True)
                    compiled.writestr(f"{name}c", importlib.util.MAGIC_NUMBER + _UNCHECKED + marshal.dumps(code))
        write_atomic(target, buffer.getvalue(), sync=True)
