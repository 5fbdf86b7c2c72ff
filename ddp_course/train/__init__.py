"""What does a whole training program look like, for images, for text and for games?

Read it in this order: `config.py` (what can be chosen), `images.py` (the program), `schedule.py` and `speed.py` (its
options), `run.py` (how it comes back), `program.py` (how it comes to ranks), `gpt.py` and `policy.py` (two more).
"""

from ddp_course.train.config import Config
from ddp_course.train.images import Result, train

__all__ = ["Config", "Result", "train"]
