"""The exercises of lesson 08: what if a layer looks at the whole batch?

Each file says which rows a seed gives, what happens on the ranks, and how an answer is compared with the solution.
Start with `rows.py`.
"""

from judges.sync_batchnorm.backward import BACKWARD
from judges.sync_batchnorm.layer import LAYER
from judges.sync_batchnorm.own_test import OWN_TEST
from judges.sync_batchnorm.statistics import STATISTICS

EXERCISES = (STATISTICS, LAYER, BACKWARD, OWN_TEST)
