"""The exercises of lesson 14: leave when told, go on as before, how often to save, and save beside the training.

Read next: `sigterm.py`.
"""

from ddp_course.grading.lessons.fault_tolerance.background import BACKGROUND
from ddp_course.grading.lessons.fault_tolerance.cadence import CADENCE
from ddp_course.grading.lessons.fault_tolerance.resume import RESUME
from ddp_course.grading.lessons.fault_tolerance.sigterm import SIGTERM

EXERCISES = (SIGTERM, RESUME, CADENCE, BACKGROUND)
