"""One class per kind of failure. The DAG's retry policy maps classes to actions, and users alert on them."""

from __future__ import annotations

from airflow.sdk.exceptions import AirflowException


class TrainingError(AirflowException):
    """Root of everything that this provider raises of its own, but for :class:`~swift_provider.config.ConfigError`."""


class HostKeyUnknown(TrainingError):
    """A node's host key is not known or has changed. Retrying does not help; the message says how to add it."""


class NodeUnreachable(TrainingError):
    """No SSH connection to a node could be made, or it was lost. Says nothing about what runs there."""


class AgentFailed(TrainingError):
    """The agent on a node gave no answer; the message holds its last words."""


class PreflightFailed(TrainingError):
    """At least one node is not fit to train; the message is the table of all faults of all nodes."""


class StageFailed(TrainingError):
    """A model or dataset could not be put on a node, or nodes hold different contents."""


class NodeBusy(TrainingError):
    """A node's lease is with another job; the message names it. Try again later."""


class GangStartFailed(TrainingError):
    """A node could not start its part; what had been started elsewhere was stopped again."""


class TrainingFailed(TrainingError):
    """The training ended by itself with an error; the message holds the first cause that was found."""


class TrainingRefused(TrainingError):
    """The training ended with an error that every other try would meet again: wrong arguments, no memory, bad data."""


class NoProgress(TrainingError):
    """Several generations in a row ended without a new complete checkpoint. Trying on would burn GPU hours."""


class TrainingStopped(TrainingError):
    """The training was stopped by someone other than this task, for example by hand on a node."""


class DeadlineExceeded(TrainingError):
    """``max_runtime`` is over. Retrying does not help."""


class NodeLost(TrainingError):
    """A supervisor is dead (reboot, power-off, kill -9): the gang cannot go on. The next try resumes."""


class ExportFailed(TrainingError):
    """No merged or quantized model of the run could be made, or it is not verified in the bucket."""


class BackupFailed(TrainingError):
    """At least one complete checkpoint is not verified in the bucket; nothing was lost on the nodes."""


class PruneFailed(TrainingError):
    """Something that the policy lets go could not be deleted."""


class RestoreFailed(TrainingError):
    """A checkpoint could not be brought back to a node; what came is kept, and the next try goes on from there."""


class CleanUpFailed(TrainingError):
    """Something that is garbage could not be deleted."""
