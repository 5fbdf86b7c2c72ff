"""The exercise of lesson 18: cut two layers.

Read next: `cut_layers.py`.
"""

from judges.model_parallel.cut_layers import CUT_LAYERS

EXERCISES = (CUT_LAYERS,)
