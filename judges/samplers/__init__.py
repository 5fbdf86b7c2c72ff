"""The exercises of lesson 05: deal the samples, count each row once, draw by weight, go on in the middle.

A sampler is plain arithmetic: one process makes those of all ranks and looks at what they deal together. The evaluation
runs on ranks.
"""

from judges.samplers.deal import DEAL
from judges.samplers.evaluate import EVALUATE
from judges.samplers.resume import RESUME
from judges.samplers.weighted import WEIGHTED

EXERCISES = (DEAL, EVALUATE, WEIGHTED, RESUME)

__all__ = ["DEAL", "EVALUATE", "EXERCISES", "RESUME", "WEIGHTED"]
