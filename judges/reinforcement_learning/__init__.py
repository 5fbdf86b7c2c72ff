"""The exercises of lesson 19: seeds of their own, advantages over all ranks, and one step of all ranks.

Read next: `seeds.py`.
"""

from judges.reinforcement_learning.advantages import ADVANTAGES
from judges.reinforcement_learning.seeds import SEEDS
from judges.reinforcement_learning.step import STEP

EXERCISES = (SEEDS, ADVANTAGES, STEP)
