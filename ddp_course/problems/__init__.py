"""How large, how long, how many? Small problems with other numbers each time, and answers that were counted."""

from ddp_course.problems.sheet import Sheet, problems

__all__ = ["Sheet", "problems"]
