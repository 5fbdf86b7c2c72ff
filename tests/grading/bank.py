"""The answer bank: what an entry is, and how its text becomes a function, as if it had been run in a notebook.

Each lesson has a file `bank_NN.py` with IMPORTS, RIGHT and WRONG. Each wrong answer names the checks that it must fail
(and no others may fail), and words of the hint that it must get.
"""

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ddp_course.grading.registry import find_exercise

ALL = "all"  # every check of the exercise
BANKS = sorted(path.stem.removeprefix("bank_") for path in Path(__file__).parent.glob("bank_[0-9][0-9].py"))


@dataclass(frozen=True)
class Wrong:
    exercise: str
    mistake: str
    source: str
    fails: tuple[str, ...] | str  # keys of checks
    hint: str  # in what the check prints
    limit_s: float = 10.0


@dataclass(frozen=True)
class Right:
    exercise: str
    way: str
    source: str


def answers(kind: str) -> list:
    """Return all entries of all banks; `kind` is "RIGHT" or "WRONG"."""
    return [entry for lesson in BANKS for entry in getattr(_bank(lesson), kind)]


def written(exercise_id: str, source: str) -> Callable:
    """Return the answer as if its text, after the bank's imports, had been run in a notebook's cell."""
    return run_as_cell(exercise_id, imports_of(exercise_id) + source)


def imports_of(exercise_id: str) -> str:
    """Return what the bank's answers to an exercise count on."""
    return _bank(exercise_id[:2]).IMPORTS


def run_as_cell(exercise_id: str, source: str) -> Callable:
    """Return what `source` defines under the name that the exercise asks for."""
    cell = f"<ipython-input-{abs(hash(source))}>"
    linecache.cache[cell] = (len(source), None, source.splitlines(True), cell)
    namespace = {"__name__": "__main__"}  # so that it travels by value
    exec(compile(source, cell, "exec"), namespace)
    return namespace[find_exercise(exercise_id).function]


def _bank(lesson: str):
    return import_module(f"tests.grading.bank_{lesson}")
