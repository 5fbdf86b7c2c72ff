"""The exercises of lesson 17: count bytes, step a share of the parameters, cut two layers.

Read next: `arithmetic.py`.
"""

from judges.beyond_ddp.arithmetic import ARITHMETIC
from judges.beyond_ddp.cut_layers import CUT_LAYERS
from judges.beyond_ddp.sharded_step import SHARDED_STEP

EXERCISES = (ARITHMETIC, SHARDED_STEP, CUT_LAYERS)
