"""What must be saved, by whom, and how is it found again?

Read it in this order: `file.py` (one file, whole or not at all), `state.py` (what goes into it), `folder.py` (the last
few of a run).
"""

from ddp_course.checkpoint.file import CheckpointError, load_checkpoint, save_checkpoint
from ddp_course.checkpoint.folder import Checkpointer, Loaded
from ddp_course.checkpoint.state import capture_state, load_model, restore_state

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Loaded",
    "capture_state",
    "load_checkpoint",
    "load_model",
    "restore_state",
    "save_checkpoint",
]
