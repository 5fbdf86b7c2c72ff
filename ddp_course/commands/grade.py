"""The commands `ddp-course check`, `progress` and `grade`: their arguments, what they print, their exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from ddp_course.grading import progress
from ddp_course.grading.places import course_root, need_nbgrader
from ddp_course.grading.registry import exercises_of

LINUX = sys.platform == "linux"


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
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)) if LINUX else os.cpu_count(),
                        help="submissions at a time (default: one for each core, %(default)s)")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="grade also what was graded before and has not changed")


def run_grade(args: argparse.Namespace) -> int:
    """Grade a class; return 0 when every submission was looked at, 2 when there is nothing to grade."""
    try:
        need_nbgrader()
        from ddp_course.grading.whole_class import WholeClass

        root = course_root()
        if not args.submissions.is_dir():
            raise RuntimeError(f"{args.submissions} is not a folder; it holds <student>/<lesson>/<lesson>.ipynb")
        if args.workers < 1:
            raise RuntimeError(f"--workers {args.workers} cannot grade anything; give at least 1")
        with WholeClass(root, args.submissions, args.into or root, args.workers, args.again) as whole_class:
            if not whole_class.digests:
                raise RuntimeError(f"no submissions in {args.submissions}; expected <student>/<lesson>/<lesson>.ipynb")
            print_grades(whole_class)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what is shown above is kept, and the same command goes on from there", file=sys.stderr)
        return 130
    return 0


def print_grades(whole_class) -> None:
    """Grade all, and print a line for each submission as soon as it is done."""
    from tqdm import tqdm

    width = max(9, *(len(student) for student, _ in whole_class.digests))
    before, started = len(whole_class.done), time.monotonic()
    with tqdm(total=len(whole_class.digests), initial=before, unit="submission", disable=None) as bar:
        if before:
            bar.write(f"{before} of {len(whole_class.digests)} were graded before and have not changed")
        try:
            for graded in whole_class.grade():
                bar.write(f"{graded.student:{width}} {_row(graded, exercises_of(graded.lesson))}")
                for note in graded.notes:
                    bar.write(f"{'':{width}}   {note}")
                bar.update()
        finally:
            table = whole_class.write_table()
    print(f"graded in {time.monotonic() - started:.0f} s")
    print(f"points: {table}, and for formgrader {whole_class.into / 'gradebook.db'}")
    print(f"feedback: {whole_class.into / 'feedback'}")


def _row(graded, exercises) -> str:
    if graded.reason:
        return f"{graded.lesson}  not graded: {graded.reason}"
    cells = [f"{exercise.id} {graded.points[exercise.id]:g}/{exercise.points}" for exercise in exercises]
    total = f"{sum(graded.points.values()):g}/{sum(exercise.points for exercise in exercises)}"
    return "  ".join([graded.lesson, *cells, f"total {total}"])


def add_progress_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ddp-course progress`."""
    parser.add_argument("--forget", action="store_true", help="delete the notes of all your checks")


def run_progress(args: argparse.Namespace) -> int:
    """Show how far the learner is; return 0, or 2 when no notes are kept."""
    try:
        path = progress.progress_file()
        if path is None:
            raise RuntimeError(f"{progress.VARIABLE} is set and empty, so no notes are kept")
        if args.forget:
            path.unlink(missing_ok=True)
        print(progress.shown(path))
    except (OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
