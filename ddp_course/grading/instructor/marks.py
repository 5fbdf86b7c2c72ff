"""In which tables do the marks of a class go out? A full one, and one each for Canvas, Moodle and nbgrader's reader.

`grades.csv` has a row for each submission. Canvas and Moodle want a row for each student and a column for each
assignment. Where a submission was not graded, their cell stays empty: that leaves alone what they have, and is no zero.

Read next: `class_report.py`, the same marks in a picture.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from ddp_course.grading.instructor.classroom import Graded
from ddp_course.grading.registry import LESSONS, QUESTION_POINTS, exercises_of


def write_marks(submissions: list[Graded], into: Path) -> list[Path]:
    """Write grades.csv, grades_canvas.csv and grades_moodle.csv, each whole or not at all; return where they are."""
    lessons = sorted({graded.lesson for graded in submissions})
    totals: dict[str, dict[str, str]] = {}
    for graded in submissions:
        earned = "" if graded.reason else f"{total(graded):g}"
        totals.setdefault(graded.student, {})[graded.lesson] = earned
    marks = [(student, [of.get(lesson, "") for lesson in lessons]) for student, of in totals.items()]
    names = [LESSONS[lesson] for lesson in lessons]
    canvas = [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", *names],
        ["Points Possible", "", "", "", "", *map(full_marks, lessons)],
        *([student, "", "", student, "", *earned] for student, earned in marks),
    ]
    moodle = [["username", *names], *([student, *earned] for student, earned in marks)]
    tables = {"grades.csv": _by_submission(submissions), "grades_canvas.csv": canvas, "grades_moodle.csv": moodle}
    return [_write(into / name, rows) for name, rows in tables.items()]


def full_marks(lesson: str) -> int:
    """The points of all exercises of a lesson, and of its question."""
    return sum(exercise.points for exercise in exercises_of(lesson)) + QUESTION_POINTS


def total(graded: Graded) -> float:
    """All points of a submission; a question that nobody has read yet counts 0."""
    return sum(graded.points.values()) + (graded.question or 0)


def _by_submission(submissions: list[Graded]) -> list[list]:
    most = max((len(graded.points) for graded in submissions), default=0)
    exercises = [f"exercise {number + 1}" for number in range(most)]
    rows = [["student", "lesson", "points", "of", *exercises, "question", "remark"]]
    for graded in submissions:
        earned = [f"{points:g}" for points in graded.points.values()]
        earned += [""] * (most - len(earned))
        unread = [] if graded.reason or graded.question is not None else ["nobody has read the question's answer yet"]
        remark = f"not graded: {graded.reason}" if graded.reason else "; ".join(graded.notes + unread)
        of, question = full_marks(graded.lesson), "" if graded.question is None else f"{graded.question:g}"
        rows.append([graded.student, graded.lesson, f"{total(graded):g}", of, *earned, question, remark])
    return rows


def _write(path: Path, rows: Iterable[list]) -> Path:
    scratch = path.with_suffix(".csv.part")
    with scratch.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    scratch.replace(path)
    return path
