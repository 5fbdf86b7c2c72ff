"""The answer bank: what an entry is, and how its text becomes a function, as if it had been run in a notebook.

Beside each solution notebook is a file `bank.py` with IMPORTS, RIGHT and WRONG. Each wrong answer names the checks
that it must fail (and no others may fail), and words of the hint that it must get. `right` and `wrong` make many of
them from one text, most as edits of another answer.
"""

import linecache
import re
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


def right(exercise: str, base: str, told: str) -> list[Right]:
    """Return right answers; `told` has their ways, with the text of each as in `wrong`."""
    return [Right(exercise, way, source) for way, source in _texts(base, told)]


def wrong(exercise: str, base: str, told: str) -> list[Wrong]:
    r"""Return wrong answers, most of which are nearly a right one.

    Args:
        base: the right one.
        told: of each a line `mistake | keys of checks | hint`, maybe with `| limit_s`; it goes on in one that begins
            with `| `. Indented by four below it is the whole answer, or `old => new` for each edit. A line of edits
            without an arrow goes on with the new text, and `\n` is a new line.
    """
    found = []
    for head, source in _texts(base, told):
        mistake, keys, hint, *limit_s = head.split(" | ")
        fails = ALL if keys == ALL else tuple(keys.split())
        found.append(Wrong(exercise, mistake, source, fails, hint, *map(float, limit_s)))
    return found


def edited(source: str, *changes: tuple[str, str]) -> str:
    """Put other text into an answer; each text to be replaced must be there."""
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    return source


def spoilt(exercise: str, right: str, rows: list[tuple]) -> list[Wrong]:
    """Return wrong answers. A row: mistake, failing checks, hint, old and new texts, perhaps a limit in seconds."""
    found = []
    for mistake, fails, hint, *changes in rows:
        limit_s = changes.pop() if isinstance(changes[-1], float) else 10.0
        keys = fails if fails == ALL else tuple(fails.split())
        found.append(Wrong(exercise, mistake, edited(right, *changes), keys, hint, limit_s))
    return found


def _texts(base: str, told: str) -> Iterator[tuple[str, str]]:
    for entry in re.split(r"\n(?=\S)", told.strip("\n").replace("\n| ", " | ")):
        head, _, body = entry.partition("\n")
        body, source = re.sub("(?m)^ {4}", "", body), base
        if re.match("(def|class|from|import) ", body):
            source = f"\n{body}\n"
        else:
            for edit in re.split(r"\n(?=.* =>)", body):
                old, new = (part.replace(r"\n", "\n") for part in re.split(" => ?", edit))
                assert old in source, f"{head}: there is no {old!r} to edit"
                source = source.replace(old, new)
        yield head, source


def answers(kind: str) -> list:
    """Return all entries of all banks; `kind` is "RIGHT" or "WRONG"."""
    return [entry for lesson in BANKS for entry in getattr(bank_of(lesson), kind)]


def all_right() -> list[Right]:
    """Return the right answers of all banks, and the solutions."""
    return [*answers("RIGHT"), *(solution for lesson in BANKS for solution in _solutions_of(lesson))]


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
