"""What must be saved, by whom, and how is it found again?

Read it in this order: `file.py` (one file, whole or not at all), `state.py` (what goes into it), `folder.py` (the last
few of a run), `cadence.py` (when).
"""

from ddp_course.checkpoint.file import CheckpointError, load_checkpoint, save_checkpoint
from ddp_course.checkpoint.folder import Checkpointer, Loaded

__all__ = ["CheckpointError", "Checkpointer", "Loaded", "load_checkpoint", "save_checkpoint"]
