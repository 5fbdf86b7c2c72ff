"""The commands `ddp-course check` and `ddp-course grade`: their arguments, what they print, their exit codes."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from ddp_course.grading.places import course_root, need_nbgrader
from ddp_course.grading.registry import exercises_of


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ddp-course check`."""
    parser.add_argument("exercise", help="a lesson, such as 03, or one exercise, such as 03.2")
    parser.add_argument("--notebook", type=Path, default=None, help="another notebook than the one in exercises/")
    parser.add_argument("--seed", type=int, default=0, help="check with other values (default: %(default)s)")


def run_check(args: argparse.Namespace) -> int:
    """Check the saved answers; return 0 for full marks, 1 for less, 2 when there is nothing to check."""
    try:
        from ddp_course.grading.terminal import check_notebook, chosen_exercises, notebook_of
    except ModuleNotFoundError as error:
        print(
            f"checking a notebook needs {error.name}: run `make env`, or pip install 'ddp-course[course]'",
            file=sys.stderr,
        )
        return 2
    try:
        lesson, dot, number = args.exercise.partition(".")
        what = f"{lesson:0>2}{dot}{number}"  # "3" is lesson 03
        exercises = chosen_exercises(what)
        path = args.notebook or notebook_of(what, course_root())
        points = check_notebook(path, exercises, args.seed)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    total, full = sum(points.values()), sum(exercise.points for exercise in exercises)
    print(f"{path.name}: {total:g} of {full} points")
    return 0 if total == full else 1


def add_grade_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ddp-course grade`."""
    parser.add_argument("submissions", type=Path, help="a folder with <student>/<lesson>/<lesson>.ipynb")
    parser.add_argument("--into", type=Path, default=None, help="where gradebook.db, autograded/ and feedback/ go "
                        "(default: the course's folder, where formgrader looks for them)")  # fmt: skip


def run_grade(args: argparse.Namespace) -> int:
    """Grade a class; return 0 when every submission was looked at, 2 when there is nothing to grade."""
    try:
        need_nbgrader()
        from ddp_course.grading.classroom import Classroom

        root = course_root()
        if not args.submissions.is_dir():
            raise RuntimeError(f"{args.submissions} is not a folder; it holds <student>/<lesson>/<lesson>.ipynb")
        with Classroom(root, args.submissions, args.into or root) as classroom:
            if not classroom.found():
                raise RuntimeError(f"no submissions in {args.submissions}; expected <student>/<lesson>/<lesson>.ipynb")
            print_grades(classroom)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the submissions shown above are in the gradebook", file=sys.stderr)
        return 130
    return 0


def print_grades(classroom) -> None:
    """Grade all and print a line for each submission as soon as it is done."""
    width = max(9, *(len(student) for student, _ in classroom.found()))
    lesson, started = None, time.monotonic()
    for graded in classroom.grade_all():
        exercises = exercises_of(graded.lesson)
        if graded.lesson != lesson:
            lesson = graded.lesson
            print(f"{'lesson ' + lesson:{width}}", *(f"{e.id:>6}" for e in exercises), "  total", flush=True)
        print(f"{graded.student:{width}}", _row(graded, exercises), flush=True)
        for note in graded.notes:
            print(f"{'':{width}}   {note}", flush=True)
    print(f"graded in {time.monotonic() - started:.0f} s")
    print(f"points: {classroom.into / 'gradebook.db'}")
    print(f"feedback: {classroom.into / 'feedback'}")


def _row(graded, exercises) -> str:
    if graded.reason:
        return f"not graded: {graded.reason}"
    cells = [f"{graded.points[e.id]:>4g}/{e.points}" for e in exercises]
    return " ".join([*cells, f"{sum(graded.points.values()):>4g}/{sum(e.points for e in exercises)}"])
