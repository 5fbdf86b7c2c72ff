"""How long does a learner wait for the answer of a check?

The solution of each exercise is checked some times, and an answer that never comes back once. The first check of a
process loads what all need, so it is not counted; its time stands in a row of its own.

Read next: `measure.py`, what is made of the samples.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable

import nbformat

from benchmarks.measure import Plan, Result, Row, Target
from ddp_course.grading import check
from ddp_course.grading.registry import LESSONS, exercises_of
from tests.grading.bank import run_as_cell
from tests.grading.submissions import cell_of, solutions, source_of

TITLE = "One check of an exercise: of its solution, and of an answer that hangs"
NOTES = ["Seconds from the call to the last line. Exercises take turns, so a busy moment does not hit one alone."]
BLOCKS, QUICK_BLOCKS = 5, 1
ANSWERS_S, HANG_S = 5.0, 15.0  # what a learner may have to wait
HANGS = "def {name}(*args, **kwargs):\n    while True:\n        pass\n"


def measure(plan: Plan) -> Result:
    """Measure all that `plan` wants; a quick plan asks the first exercise of each lesson only."""
    exercises = [e for lesson in LESSONS for e in exercises_of(lesson)[: 1 if plan.quick else None]]
    first = Row("first", "the first check of a process", 1)
    rows = {e.id: Row(e.id, f"{e.id} {e.title}", 1) for e in exercises}
    hangs = {e.id: Row(f"{e.id}_hang", f"{e.id}, an answer that hangs", 1) for e in exercises}
    first.samples.append(seconds(exercises[0].id, solution(exercises[0].id), exercises[0].points))
    for _ in range(QUICK_BLOCKS if plan.quick else BLOCKS):
        for exercise in exercises:
            if plan.wants(exercise.id):
                took(rows[exercise.id], solution(exercise.id), exercise.points)
    for exercise in exercises:
        if plan.wants(f"{exercise.id}_hang"):
            print(f"checks: {exercise.id} hangs", file=sys.stderr, flush=True)
            took(hangs[exercise.id], run_as_cell(exercise.id, HANGS.format(name=exercise.function)), 0)
    wanted = [first, *(row for row in (*rows.values(), *hangs.values()) if plan.wants(row.key))]
    return Result(TITLE, wanted, targets(list(rows.values()), list(hangs.values())), NOTES)


def solution(exercise_id: str) -> Callable:
    """Return the solution of an exercise, as if its cell had been run."""
    setup = cell_of(nbformat.read(source_of(exercise_id[:2]), as_version=4), "setup").source
    return run_as_cell(exercise_id, f"{setup}\n{solutions(exercise_id[:2])[exercise_id]}")


def took(row: Row, answer: Callable, points: int) -> None:
    """Add one sample to a row, or what went wrong."""
    try:
        row.samples.append(seconds(row.key.partition("_")[0], answer, points))
    except RuntimeError as error:
        row.failed = str(error)


def seconds(exercise_id: str, answer: Callable, points: int) -> float:
    """Return how long one check takes.

    Raises:
        RuntimeError: it gives other points than expected, so its time means nothing.
    """
    said, start = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(said):
        found = check(exercise_id, answer, seed=1)  # as a grader: no learner's progress is noted
    elapsed = time.perf_counter() - start
    if found != points:
        raise RuntimeError(f"{exercise_id}: {found} points instead of {points}:\n{said.getvalue()}")
    return elapsed


def targets(rows: list[Row], hangs: list[Row]) -> list[Target]:
    """The slowest exercise has to keep the limit."""
    slowest = [max((row.median for row in group if row.samples), default=None) for group in (rows, hangs)]
    return [
        Target("the slowest exercise answers", ANSWERS_S, slowest[0], "s"),
        Target("the longest hang is ended", HANG_S, slowest[1], "s"),
    ]
