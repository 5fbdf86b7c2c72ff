"""The behaviour checks behind the exercises.

`checking.py` is all of it in one page, `exercise.py` says what an exercise and a finding are, `registry.py` finds the
judges. Then room by room: `answer/` (how an answer runs), `vocabulary/` (what a judge can ask), `learner/` (a check,
a hint, points), `instructor/` (a class), `sandbox/` (strangers' notebooks). `journal.py` keeps notes, `places.py` knows
where the course's files are.
"""

from ddp_course.grading.checking import check

__all__ = ["check"]
