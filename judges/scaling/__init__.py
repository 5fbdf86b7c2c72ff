"""The exercises of lesson 14: the cost of a message, a step on paper, and tokens per GPU.

Read next: `message_cost.py`.
"""

from judges.scaling.event_step import STEP
from judges.scaling.least_tokens import TOKENS
from judges.scaling.message_cost import COST

EXERCISES = (COST, STEP, TOKENS)
