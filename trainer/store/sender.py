"""Many files into one place of a bucket, at once: what is there already is not sent, what the bucket has is copied."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Dict, Mapping, Optional, Sequence, Tuple

from trainer.files import size_or_zero
from trainer.store.client import Stored, StoreError, list_uploads
from trainer.store.crc64 import of_file
from trainer.store.ledger import Entry, Ledger, stat_of
from trainer.store.multipart import abort_upload
from trainer.store.upload import Sent, Settings, Upload

if TYPE_CHECKING:
    import oss2

COPY_FROM = 64 << 10  # bytes; to copy a smaller file takes as long as to send it
DEAD_AFTER_S = 24 * 3600.0  # an unfinished upload of a key that is not proven counts as dead after that
FILES_AT_ONCE = 8


@dataclass
class Outcome:
    """What became of each file, by key: ``proven`` or ``errors``."""

    proven: Dict[str, Sent] = field(default_factory=dict)
    errors: Dict[str, str] = field(default_factory=dict)


class Sender:
    """Sends files to keys below ``prefix``; each file is proven by its CRC64 before it counts.

    Args:
        bucket: where.
        prefix: the checkpoint's folder; what was proven beside it (other checkpoints of the run) may be copied.
        settings: see :class:`~trainer.store.upload.Settings`.
        fixed: key → (size, CRC64) of objects that a manifest speaks for: they are never overwritten by other bytes.
    """

    def __init__(
        self,
        bucket: oss2.Bucket,
        prefix: str,
        settings: Settings,
        fixed: Optional[Mapping[str, Tuple[int, str]]] = None,
    ) -> None:
        self._bucket, self._prefix, self._settings, self._fixed = bucket, prefix, settings, fixed or {}
        self._ledger = Ledger(settings.state_dir, f"{bucket.bucket_name}/{os.path.dirname(prefix)}")

    def send(self, files: Sequence[Tuple[str, str]]) -> Outcome:
        """Send ``(path, key)`` pairs; one that fails does not keep the others from being sent. Biggest first."""
        outcome = Outcome()
        order = sorted(files, key=lambda item: (-size_or_zero(item[0]), item[1]))
        with ThreadPoolExecutor(self._settings.threads) as parts, ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            running = {key: pool.submit(self._send, path, key, parts) for path, key in order}
            for key, future in running.items():
                try:
                    outcome.proven[key] = future.result()
                except (StoreError, OSError) as error:
                    outcome.errors[key] = str(error)
        return outcome

    def _send(self, path: str, key: str, parts: ThreadPoolExecutor) -> Sent:
        stat = stat_of(path)
        crc = self._ledger.crc_of(path)
        fixed = self._fixed.get(key)
        if fixed is not None:
            crc = of_file(path) if crc is None else crc
            if fixed != (stat[0], str(crc)):
                raise StoreError(
                    f"{path} is another file than the one that {self._prefix}/manifest.json speaks for: the bucket "
                    f"holds a proven checkpoint of the same name; delete it, or clear the run under another name"
                )
        twins = self._ledger.twins(path, key) if stat[0] >= COPY_FROM else []
        if twins and crc is None:
            crc = of_file(path)
        twin = next((entry for entry in twins if entry.crc == crc), None)
        upload = Upload(self._bucket, key, path, self._settings, parts)
        sent = upload.run(crc, copy_from=None if twin is None else _object_of(twin))
        self._ledger.note(path, stat, sent.stored)
        return sent

    def clean_up(self, proven: Sequence[str]) -> int:
        """Drop the unfinished uploads below the prefix that nobody needs; returns how many.

        That is those of keys that are proven (whoever still sends one of them finds the object there and is done),
        and those that are more than a day old. A server that does not let us look is left alone.
        """
        done, dropped = set(proven), 0
        try:
            dead = [
                (key, upload_id)
                for key, upload_id, began in list_uploads(self._bucket, self._prefix + "/")
                if key in done or time.time() - began > DEAD_AFTER_S
            ]
        except StoreError:
            return 0
        for key, upload_id in dead:
            dropped += abort_upload(self._bucket, key, upload_id)
        return dropped


def _object_of(entry: Entry) -> Stored:
    return Stored(entry.key, entry.size, str(entry.crc), entry.etag)
