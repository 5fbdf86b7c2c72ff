"""The exercises of lesson 03: who am I, how do we meet, who belongs to my group, and how does a whole program begin?

Each file has an exercise as tables, as `ddp_course/grading/differential.py` says; `nodes.py` has two.
"""

from judges.process_groups.join import JOIN
from judges.process_groups.nodes import FROM_LEADER, NODE_SUM
from judges.process_groups.place import PLACE
from judges.process_groups.program import PROGRAM

EXERCISES = (PLACE, JOIN, NODE_SUM, PROGRAM, FROM_LEADER)

__all__ = ["EXERCISES", "FROM_LEADER", "JOIN", "NODE_SUM", "PLACE", "PROGRAM"]
