"""The exercises of lesson 02: two steps of DataParallel, written by hand.

All of it is one process with threads, so one rank runs each answer.
"""

from judges.data_parallel.home import HOME
from judges.data_parallel.threads import THREADS

EXERCISES = (THREADS, HOME)

__all__ = ["EXERCISES", "HOME", "THREADS"]
