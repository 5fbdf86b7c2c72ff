"""The exercises of lesson 13: efficiency with its interval, the cost of a message, and a step on paper.

Read next: `efficiency.py`.
"""

from ddp_course.grading.lessons.scaling.efficiency import EFFICIENCY
from ddp_course.grading.lessons.scaling.event_step import STEP
from ddp_course.grading.lessons.scaling.message_cost import COST

EXERCISES = (EFFICIENCY, COST, STEP)
