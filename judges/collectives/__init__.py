"""The exercises of lesson 04: what moves between the ranks, and what does it cost?"""

from judges.collectives.cost import COST
from judges.collectives.gather_rows import GATHER_ROWS
from judges.collectives.ring import RING
from judges.collectives.two_levels import TWO_LEVELS

EXERCISES = (GATHER_ROWS, RING, COST, TWO_LEVELS)

__all__ = ["COST", "EXERCISES", "GATHER_ROWS", "RING", "TWO_LEVELS"]
