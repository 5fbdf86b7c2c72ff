"""The exercises of lesson 08: what if a layer looks at the whole batch?

Each file has drivers, which run on the ranks and call the learner's function or class, and a judge, which chooses the
rows from a seed and compares with one process that has them all. Start with `rows.py`, which makes the rows.
"""

from ddp_course.grading.lessons.sync_batchnorm.backward import BACKWARD
from ddp_course.grading.lessons.sync_batchnorm.convert import CONVERT
from ddp_course.grading.lessons.sync_batchnorm.layer import LAYER
from ddp_course.grading.lessons.sync_batchnorm.statistics import STATISTICS

EXERCISES = (STATISTICS, LAYER, BACKWARD, CONVERT)

__all__ = ["BACKWARD", "CONVERT", "EXERCISES", "LAYER", "STATISTICS"]
