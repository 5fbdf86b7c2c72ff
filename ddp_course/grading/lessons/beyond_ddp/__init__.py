"""The exercises of lesson 17: count bytes, step a share of the parameters, cut two layers.

Read next: `arithmetic.py`.
"""

from ddp_course.grading.lessons.beyond_ddp.arithmetic import ARITHMETIC
from ddp_course.grading.lessons.beyond_ddp.cut_layers import CUT_LAYERS
from ddp_course.grading.lessons.beyond_ddp.sharded_step import SHARDED_STEP

EXERCISES = (ARITHMETIC, SHARDED_STEP, CUT_LAYERS)
