"""The exercises of lesson 09: one number from many ranks, written down by one of them.

Each file has a driver, which runs on the ranks and calls the learner's function, and a judge, which chooses the cases
from a seed and compares.
"""

from judges.logging.evaluate import EVALUATE
from judges.logging.mean import MEAN
from judges.logging.writer import WRITER

EXERCISES = (MEAN, WRITER, EVALUATE)

__all__ = ["EVALUATE", "EXERCISES", "MEAN", "WRITER"]
