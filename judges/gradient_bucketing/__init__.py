"""The exercises of lesson 07: what shares a message, when does it leave, and what may be left unsaid?

Each file says what happens on the ranks, which cases a seed gives, and what is expected.
"""

from judges.gradient_bucketing.accumulation import ACCUMULATE
from judges.gradient_bucketing.compression import COMPRESS
from judges.gradient_bucketing.overlap import OVERLAP
from judges.gradient_bucketing.planning import PLAN

EXERCISES = (PLAN, OVERLAP, ACCUMULATE, COMPRESS)

__all__ = ["ACCUMULATE", "COMPRESS", "EXERCISES", "OVERLAP", "PLAN"]
