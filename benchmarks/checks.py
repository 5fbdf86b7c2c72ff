"""How long does a learner wait for the answer of a check?

The solution of each exercise is checked some times, and an answer that never comes back once. The first check of a
kernel starts the ranks, which import torch: it is measured in processes of its own, and so is its first line, the sign
that something is happening.

Read next: `measure.py`, what is made of the samples.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from statistics import median

from benchmarks.measure import Plan, Result, Row, Target, show_progress
from ddp_course.grading import check
from ddp_course.grading.exercise import Exercise
from ddp_course.grading.registry import LESSONS, exercises_of
from tests.grading.bank import run_as_cell
from tests.grading.submissions import setup_of, solutions

TITLE = "One check of an exercise: of its solution, and of an answer that hangs"
NOTES = ["Seconds from the call to the last line. Exercises take turns, so a busy moment does not hit one alone."]
BLOCKS, QUICK_BLOCKS = 5, 1
FIRST_S, SIGN_S, NEXT_S, ANSWERS_S, HANG_S = 12.0, 1.0, 1.0, 5.0, 15.0  # what a learner may have to wait
HANGS = "def {name}(*args, **kwargs):\n    while True:\n        pass\n"


def measure(plan: Plan) -> Result:
    """Measure all that `plan` wants; a quick plan asks the first exercise of each lesson only."""
    exercises = [e for lesson in LESSONS for e in exercises_of(lesson)[: 1 if plan.quick else None]]
    first, sign = Row("first", "the first check of a kernel", 1), Row("first_line", "the first line of it", 1)
    rows = {e.id: Row(e.id, f"{e.id} {e.title}", 1) for e in exercises}
    hangs = {e.id: Row(f"{e.id}_hang", f"{e.id}, an answer that hangs", 1) for e in exercises}
    for number in range(QUICK_BLOCKS if plan.quick else BLOCKS):
        line_s, all_s = in_a_new_kernel(exercises[number])
        first.samples.append(all_s)
        sign.samples.append(line_s)
    for exercise in exercises:  # starts the ranks, and imports each judge
        if plan.wants(exercise.id):
            seconds(exercise.id, solution(exercise.id), exercise.points)
    for number in range(blocks := QUICK_BLOCKS if plan.quick else BLOCKS):
        show_progress(f"checks: solutions, round {number + 1} of {blocks}")
        for exercise in exercises:
            if plan.wants(exercise.id):
                took(rows[exercise.id], solution(exercise.id), exercise.points)
    show_progress("checks: answers that hang")
    for exercise in exercises:
        if plan.wants(f"{exercise.id}_hang"):
            took(hangs[exercise.id], run_as_cell(exercise.id, HANGS.format(name=exercise.function)), 0)
    wanted = [first, sign, *(row for row in (*rows.values(), *hangs.values()) if plan.wants(row.key))]
    return Result(TITLE, wanted, targets(first, sign, list(rows.values()), list(hangs.values())), NOTES)


def in_a_new_kernel(exercise: Exercise) -> tuple[float, float]:
    """Return the seconds to the first line, and to the last one, of the first check in a process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as kernel:
        return kernel.submit(timed, exercise.id, exercise.points).result()


def timed(exercise_id: str, points: int) -> tuple[float, float]:
    """Return the seconds to the first line of a solution's check, and to the last one."""
    answer, said = solution(exercise_id), Said()
    total = seconds(exercise_id, answer, points, said)
    return said.first_s, total


class Said(io.StringIO):
    """What a check says, and after how many seconds it began to."""

    def __init__(self):
        super().__init__()
        self.start, self.first_s = time.perf_counter(), 0.0

    def write(self, text: str) -> int:
        self.first_s = self.first_s or time.perf_counter() - self.start
        return super().write(text)


def solution(exercise_id: str) -> Callable:
    """Return the solution of an exercise, as if its cell had been run."""
    lesson = exercise_id[:2]
    with contextlib.redirect_stdout(io.StringIO()):  # lesson 11's setup prints the program that is to be changed
        return run_as_cell(exercise_id, setup_of(lesson) + solutions(lesson)[exercise_id])


def took(row: Row, answer: Callable, points: int) -> None:
    """Add one sample to a row, or what went wrong."""
    try:
        row.samples.append(seconds(row.key.partition("_")[0], answer, points))
    except RuntimeError as error:
        row.failed = str(error)


def seconds(exercise_id: str, answer: Callable, points: int, said: io.StringIO | None = None) -> float:
    """Return how long one check takes.

    Raises:
        RuntimeError: it gives other points than expected, so its time means nothing.
    """
    said, start = said or io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(said):
        found = check(exercise_id, answer, seed=1)  # as a grader: no learner's progress is noted
    elapsed = time.perf_counter() - start
    if found != points:
        raise RuntimeError(f"{exercise_id}: {found} points instead of {points}:\n{said.getvalue()}")
    return elapsed


def targets(first: Row, sign: Row, rows: list[Row], hangs: list[Row]) -> list[Target]:
    """The first check, the others as a whole, and the slowest of them."""
    answers = [row.median for row in rows if row.samples]
    hanging = [row.median for row in hangs if row.samples]
    return [
        Target("the first check of a kernel answers", FIRST_S, first.median, "s"),
        Target("it shows that it has begun", SIGN_S, sign.median, "s"),
        Target("a later check answers, median of the exercises", NEXT_S, median(answers) if answers else None, "s"),
        Target("the slowest exercise answers", ANSWERS_S, max(answers, default=None), "s"),
        Target("the longest hang is ended", HANG_S, max(hanging, default=None), "s"),
    ]
