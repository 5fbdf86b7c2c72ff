"""The exercises of lesson 08: what if a layer looks at the whole batch?

Each file has drivers, which run on the ranks and call the learner's function or class, and a judge, which chooses the
rows from a seed and compares with one process that has them all. Start with `rows.py`, which makes the rows.
"""

from judges.sync_batchnorm.backward import BACKWARD
from judges.sync_batchnorm.convert import CONVERT
from judges.sync_batchnorm.layer import LAYER
from judges.sync_batchnorm.statistics import STATISTICS

EXERCISES = (STATISTICS, LAYER, BACKWARD, CONVERT)

__all__ = ["BACKWARD", "CONVERT", "EXERCISES", "LAYER", "STATISTICS"]
