"""The exercises of lesson 14: the cost of a message, tokens per GPU, and a step on paper.

Read next: `message_cost.py`.
"""

from judges.scaling.event_step import STEP
from judges.scaling.least_tokens import TOKENS
from judges.scaling.message_cost import COST

EXERCISES = (COST, TOKENS, STEP)
