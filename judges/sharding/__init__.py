"""The exercises of lesson 17: count bytes, step a share of the parameters, shard a model and save it.

Read next: `arithmetic.py`.
"""

from judges.sharding.arithmetic import ARITHMETIC
from judges.sharding.shard_and_save import SHARD_AND_SAVE
from judges.sharding.sharded_step import SHARDED_STEP

EXERCISES = (ARITHMETIC, SHARDED_STEP, SHARD_AND_SAVE)
