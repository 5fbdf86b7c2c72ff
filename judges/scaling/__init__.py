"""The exercises of lesson 14: efficiency with its interval, the cost of a message, and a step on paper.

Read next: `efficiency.py`.
"""

from judges.scaling.efficiency import EFFICIENCY
from judges.scaling.event_step import STEP
from judges.scaling.message_cost import COST

EXERCISES = (EFFICIENCY, COST, STEP)
