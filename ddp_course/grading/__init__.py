"""The behaviour checks behind the exercises.

Read it in this order: `exercise.py` (what a check says), `isolated.py` (how an answer is run), `observe.py` (what is
noted meanwhile), `compare.py` (how results are compared), `judges/` (what is asked), `checking.py` (all of it).
`journal.py` and `progress.py` keep a learner's points. `execute.py` and `terminal.py` run whole notebooks.
`release.py`, `autograder.py`, `classroom.py` and `whole_class.py` are for instructors and need nbgrader.
"""

from ddp_course.grading.checking import check

__all__ = ["check"]
