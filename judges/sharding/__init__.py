"""The exercises of lesson 17: count bytes, step a share of the parameters.

Read next: `arithmetic.py`.
"""

from judges.sharding.arithmetic import ARITHMETIC
from judges.sharding.sharded_step import SHARDED_STEP

EXERCISES = (ARITHMETIC, SHARDED_STEP)
