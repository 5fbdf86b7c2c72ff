"""The behaviour checks behind the exercises.

`checking.py` is all of it in one page, `exercise.py` says what an exercise and a finding are, `registry.py` finds the
judges. Then room by room: `answer/` (how an answer runs), `vocabulary/` (what a judge can ask), `learner/` (a check,
a hint, points), `instructor/` (a class), `sandbox/` (strangers' notebooks). `journal.py` keeps notes, `paths.py` knows
where the course's files are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_course.grading.checking import check

__all__ = ["check"]


def __getattr__(name: str) -> Any:
    """Import torch when an answer is checked: a hint needs none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("ddp_course.grading.checking"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
