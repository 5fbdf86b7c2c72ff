"""The exercises of lesson 11: the rate at a step, shifts without a generator, and a whole step.

Read next: `rate.py`.
"""

from judges.training_end_to_end.rate import RATE
from judges.training_end_to_end.shift import SHIFT
from judges.training_end_to_end.step import STEP

EXERCISES = (RATE, SHIFT, STEP)
