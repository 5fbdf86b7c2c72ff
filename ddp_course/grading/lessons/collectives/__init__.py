"""The exercises of lesson 04: what moves between the ranks, and what does it cost?

`traffic.py` notes the messages of a rank with their peers and bytes; the other files have one exercise each.
"""

from ddp_course.grading.lessons.collectives.cost import COST
from ddp_course.grading.lessons.collectives.gather_rows import GATHER_ROWS
from ddp_course.grading.lessons.collectives.ring import RING
from ddp_course.grading.lessons.collectives.two_levels import TWO_LEVELS

EXERCISES = (GATHER_ROWS, RING, COST, TWO_LEVELS)

__all__ = ["COST", "EXERCISES", "GATHER_ROWS", "RING", "TWO_LEVELS"]
