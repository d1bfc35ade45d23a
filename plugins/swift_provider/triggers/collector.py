"""Python's garbage collector in the triggerer: a full collection stops the event loop, and so every trigger."""

from __future__ import annotations

import functools
import gc


@functools.cache
def spare_the_event_loop() -> None:
    """Once per process: takes what is there already, Airflow's modules above all, out of every later collection.

    A full collection goes through all objects: some 100 ms for Airflow's modules alone on a slow core, at times that
    nobody chooses. Those objects live as long as the process anyway.
    """
    gc.freeze()
