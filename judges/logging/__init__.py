"""The exercises of lesson 09: one number from many ranks, written down by one of them.

Each file has an exercise as tables, which `ddp_course/grading/differential.py` explains.
"""

from judges.logging.evaluate import EVALUATE
from judges.logging.mean import MEAN
from judges.logging.writer import WRITER

EXERCISES = (MEAN, WRITER, EVALUATE)
