"""The exercises of lesson 15: leave when told, go on as before, how often to save, and save beside the training.

Read next: `sigterm.py`.
"""

from judges.fault_tolerance.background import BACKGROUND
from judges.fault_tolerance.cadence import CADENCE
from judges.fault_tolerance.resume import RESUME
from judges.fault_tolerance.sigterm import SIGTERM

EXERCISES = (SIGTERM, RESUME, CADENCE, BACKGROUND)
