"""The node side: the agent that runs on each training node, and what it knows about jobs and checkpoints.

Everything here runs on Python 3.9 or newer with the standard library alone; only :mod:`trainer.store` needs
``oss2``, and imports it when it is first used.
"""

__version__ = "0.1.0"
