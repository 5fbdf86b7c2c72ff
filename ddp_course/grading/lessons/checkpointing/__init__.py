"""The exercises of lesson 10: writing, loading and resuming, and a training script with five faults.

Read next: `save.py`.
"""

from ddp_course.grading.lessons.checkpointing.load import LOAD
from ddp_course.grading.lessons.checkpointing.repair import REPAIR
from ddp_course.grading.lessons.checkpointing.resume import RESUME
from ddp_course.grading.lessons.checkpointing.save import SAVE

EXERCISES = (SAVE, LOAD, RESUME, REPAIR)
