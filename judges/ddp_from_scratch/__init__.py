"""The exercises of lesson 06: the same start, the same gradient, and a class that sees to both.

Each file has drivers, which run on the ranks and call what the learner wrote, and a judge, which chooses the cases
from a seed and compares with one process on the whole batch.
"""

from judges.ddp_from_scratch.average import AVERAGE
from judges.ddp_from_scratch.own_ddp import OWN_DDP
from judges.ddp_from_scratch.start import START
from judges.ddp_from_scratch.unused import UNUSED

EXERCISES = (START, AVERAGE, OWN_DDP, UNUSED)

__all__ = ["AVERAGE", "EXERCISES", "OWN_DDP", "START", "UNUSED"]
