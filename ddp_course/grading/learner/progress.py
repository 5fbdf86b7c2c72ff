"""How far am I? `ddp-course progress` shows the exercises of each lesson, and the points reached so far.

Every visible check that a learner runs, in a notebook or in the terminal, leaves a note in `.progress.jsonl` in the
course's folder. Nothing is sent anywhere. The best result of each exercise counts. Checks with another seed, as a
grader runs them, are not noted.

Read next: `journal.py`, how a note is kept.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from ddp_course.grading import journal
from ddp_course.grading.exercise import Exercise
from ddp_course.grading.paths import learners_root
from ddp_course.grading.registry import LESSONS, exercises_of

FILE = ".progress.jsonl"
VARIABLE = "DDP_COURSE_PROGRESS"  # another file; empty: keep no notes


@dataclass(frozen=True)
class Standing:
    """Where a learner stands in one exercise."""

    exercise: Exercise
    tries: int
    best: int


def progress_file() -> Path | None:
    """Return the file in which notes are kept, or None when none are to be kept.

    Raises:
        RuntimeError: there is no course's folder here or above.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    return learners_root() / FILE


def note_points(exercise: Exercise, points: int) -> str:
    """Keep the result of a check; return a sentence when it could not be kept, else nothing."""
    try:
        path = progress_file()
        if path is not None:
            now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            journal.append(path, {"exercise": exercise.id, "points": points, "of": exercise.points, "when": now})
    except (OSError, RuntimeError) as error:
        return f"your progress was not noted: {getattr(error, 'strerror', None) or error}"
    return ""


def standings(path: Path) -> dict[str, list[Standing]]:
    """Return, for every lesson, where the learner stands in each of its exercises."""
    reached: dict[str, list[int]] = {}
    for note in journal.notes(path):
        if isinstance(note.get("exercise"), str) and isinstance(note.get("points"), int):
            reached.setdefault(note["exercise"], []).append(note["points"])
    return {lesson: [_standing(exercise, reached) for exercise in exercises_of(lesson)] for lesson in LESSONS}


def _standing(exercise: Exercise, reached: dict[str, list[int]]) -> Standing:
    points = reached.get(exercise.id, [])
    # An exercise may have been worth more once; nobody has more than all.
    return Standing(exercise, len(points), min(exercise.points, max(points, default=0)))


def shown(path: Path) -> str:
    """Return the table that a learner reads, and what to do next."""
    lessons = standings(path)
    everything = [standing for exercises in lessons.values() for standing in exercises]
    lines = [f"{'lesson':<24} {'exercises':>10} {'points':>10}"]
    lines += [_row(LESSONS[lesson].replace("_", " ", 1), exercises) for lesson, exercises in lessons.items()]
    lines += ["", _row("all", everything)]
    left = [standing for standing in everything if standing.best < standing.exercise.points]
    if not left:
        return "\n".join([*lines, "", "All points of all exercises. Well done."])
    begun = next((standing for standing in left if standing.tries), None)
    if begun:
        lines += ["", f"begun: {_pointer(begun)}, {begun.best} of {begun.exercise.points} points so far"]
    fresh = next((standing for standing in left if not standing.tries), None)
    if fresh:
        lines += ["", f"next: {_pointer(fresh)}, {fresh.exercise.minutes} minutes"]
    return "\n".join(lines)


def as_json(path: Path) -> list[dict[str, str | int]]:
    """Return a row for each exercise, in the lessons' order."""
    return [
        {"exercise": each.exercise.id, "points": each.best, "of": each.exercise.points, "tries": each.tries}
        for exercises in standings(path).values()
        for each in exercises
    ]


def _row(name: str, exercises: list[Standing]) -> str:
    done = sum(standing.best == standing.exercise.points for standing in exercises)
    points = sum(standing.best for standing in exercises)
    full = sum(standing.exercise.points for standing in exercises)
    return f"{name:<24} {f'{done} of {len(exercises)}':>10} {f'{points} of {full}':>10}"


def _pointer(standing: Standing) -> str:
    folder = LESSONS[standing.exercise.id.partition(".")[0]]
    return f"{standing.exercise.id} {standing.exercise.title} (exercises/{folder}/{folder}.ipynb)"
