"""The exercises of lesson 10: writing, loading and resuming.

Read next: `save.py`.
"""

from judges.checkpointing.load import LOAD
from judges.checkpointing.resume import RESUME
from judges.checkpointing.save import SAVE

EXERCISES = (SAVE, LOAD, RESUME)
