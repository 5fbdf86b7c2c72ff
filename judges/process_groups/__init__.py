"""The exercises of lesson 03: who am I, how do we meet, and who belongs to my group?

Each file has drivers, which run on the ranks and call the learner's function, and a judge, which chooses the cases
from a seed and compares.
"""

from judges.process_groups.join import JOIN
from judges.process_groups.nodes import FROM_LEADER, NODE_SUM
from judges.process_groups.place import PLACE

EXERCISES = (PLACE, JOIN, NODE_SUM, FROM_LEADER)

__all__ = ["EXERCISES", "FROM_LEADER", "JOIN", "NODE_SUM", "PLACE"]
