"""The answer bank: what an entry is, and how its text becomes a function, as if it had been run in a notebook.

Beside each solution notebook is a file `bank.py` with IMPORTS, RIGHT and WRONG. Each wrong answer names the checks
that it must fail (and no others may fail), and words of the hint that it must get.
"""

import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ddp_course.grading.registry import LESSONS, find_exercise
from tests.grading.submissions import setup_of, solutions

ALL = "all"  # every check of the exercise
BANKS = sorted(path.parent.name[:2] for path in Path(__file__).parents[2].glob("solutions/*/bank.py"))


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
    setup: str | None = None  # in place of the bank's imports


def answers(kind: str) -> list:
    """Return all entries of all banks; `kind` is "RIGHT" or "WRONG"."""
    return [entry for lesson in BANKS for entry in getattr(bank_of(lesson), kind)]


def all_right() -> list[Right]:
    """Return the right answers of all banks, and the solutions."""
    return [*answers("RIGHT"), *(solution for lesson in LESSONS for solution in _solutions_of(lesson))]


def _solutions_of(lesson: str) -> Iterator[Right]:
    setup = setup_of(lesson)
    for exercise, source in solutions(lesson).items():
        yield Right(exercise, "the solution", source, setup)


def written(exercise_id: str, source: str, setup: str | None = None) -> Callable:
    """Return the answer as if its text, after `setup` or the bank's imports, had been run in a notebook's cell."""
    return run_as_cell(exercise_id, (imports_of(exercise_id) if setup is None else setup) + source)


def imports_of(exercise_id: str) -> str:
    """Return what the bank's answers to an exercise count on."""
    return bank_of(exercise_id[:2]).IMPORTS


def run_as_cell(exercise_id: str, source: str) -> Callable:
    """Return what `source` defines under the name that the exercise asks for."""
    cell = f"<ipython-input-{abs(hash(source))}>"
    linecache.cache[cell] = (len(source), None, source.splitlines(True), cell)
    namespace = {"__name__": "__main__"}  # so that it travels by value
    exec(compile(source, cell, "exec"), namespace)
    return namespace[find_exercise(exercise_id).function]


def bank_of(lesson: str) -> ModuleType:
    """Return the answers of a lesson, such as "03"."""
    return import_module(f"solutions.{LESSONS[lesson]}.bank")
