"""The exercises of lesson 11: the rate at a step, shifts without a generator, and a whole step.

Read next: `rate.py`.
"""

from ddp_course.grading.lessons.training_end_to_end.rate import RATE
from ddp_course.grading.lessons.training_end_to_end.shift import SHIFT
from ddp_course.grading.lessons.training_end_to_end.step import STEP

EXERCISES = (RATE, SHIFT, STEP)
