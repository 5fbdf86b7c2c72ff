"""The exercises of lesson 06: the same start, the same gradient, and a class that sees to both.

Each file says what happens on the ranks, which cases a seed gives, and what is expected: what one process finds on the
whole batch.
"""

from judges.ddp_from_scratch.average import AVERAGE
from judges.ddp_from_scratch.own_ddp import OWN_DDP
from judges.ddp_from_scratch.own_test import OWN_TEST
from judges.ddp_from_scratch.patient_ddp import UNUSED
from judges.ddp_from_scratch.start import START

EXERCISES = (START, AVERAGE, OWN_DDP, UNUSED, OWN_TEST)

__all__ = ["AVERAGE", "EXERCISES", "OWN_DDP", "OWN_TEST", "START", "UNUSED"]
