"""The exercises of lesson 18: convert a program, repair one, find three faults in a job's logs.

Read next: `running.py`, how a rank runs a learner's program.
"""

from judges.your_own_program.convert import CONVERT
from judges.your_own_program.incident import INCIDENT
from judges.your_own_program.repair import REPAIR

EXERCISES = (CONVERT, REPAIR, INCIDENT)
