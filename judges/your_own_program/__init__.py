"""The exercises of lesson 11: convert a program, repair two, find three faults in a job's logs, and a whole step.

Read next: `running.py`, what a training program leaves behind.
"""

from judges.your_own_program.convert import CONVERT
from judges.your_own_program.incident import INCIDENT
from judges.your_own_program.repair import REPAIR
from judges.your_own_program.script import SCRIPT
from judges.your_own_program.whole_step import STEP

EXERCISES = (CONVERT, SCRIPT, REPAIR, INCIDENT, STEP)
