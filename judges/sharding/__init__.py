"""The exercises of lesson 17: count bytes, step a share of the parameters, cut two layers.

Read next: `arithmetic.py`.
"""

from judges.sharding.arithmetic import ARITHMETIC
from judges.sharding.cut_layers import CUT_LAYERS
from judges.sharding.sharded_step import SHARDED_STEP

EXERCISES = (ARITHMETIC, SHARDED_STEP, CUT_LAYERS)
