"""Which checkpoints go and which stay: a pure decision over what is known of each, with its reason."""

from trainer.retention.decide import Decision, decide, over_budget
from trainer.retention.policy import Candidate, Policy

__all__ = ["Candidate", "Decision", "Policy", "decide", "over_budget"]
