"""The exercises of lesson 16: who reads what, one step of several batches, and how busy is the machine?

Each file has an exercise as tables, as `ddp_course/grading/differential.py` reads them.
"""

from judges.gpt2.step import STEP
from judges.gpt2.stream import STREAM
from judges.gpt2.utilisation import UTILISATION

EXERCISES = (STREAM, STEP, UTILISATION)

__all__ = ["EXERCISES", "STEP", "STREAM", "UTILISATION"]
