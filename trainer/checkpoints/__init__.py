"""Checkpoints: what lies in a folder, what many nodes hold together, and whether it is whole."""

from trainer.checkpoints.completeness import judge, step_of
from trainer.checkpoints.judgement import Judgement
from trainer.checkpoints.union import Union, merge

__all__ = ["Judgement", "Union", "judge", "merge", "step_of"]
