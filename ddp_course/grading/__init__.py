"""The behaviour checks behind the exercises.

Read it in this order: `exercise.py` (what a check says), `isolated.py` (how an answer is run), `observe.py` (what is
noted meanwhile), `lessons/` (what is asked), `check.py` (all of it together). `execute.py` and `terminal.py` run whole
notebooks. `release.py`, `autograder.py` and `classroom.py` are for instructors and need nbgrader.
"""

from ddp_course.grading.check import check

__all__ = ["check"]
