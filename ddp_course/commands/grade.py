"""How is a class graded? `ddp-course grade submitted`: a line a submission, a table of points, feedback for each.

Read next: `grading/instructor/whole_class.py`; INSTRUCTORS.md says what becomes of its files.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from ddp_course.grading.paths import course_root, need_nbgrader
from ddp_course.grading.registry import exercises_of

CLASS = "class"  # `nbgrader_config.py` names it, too
LINUX = sys.platform == "linux"


def main(argv: list[str]) -> int:
    """Grade a class; return 0 when every submission was looked at, 2 when there is nothing to grade."""
    parser = argparse.ArgumentParser(
        prog="ddp-course grade",
        description="Grade the submissions of a class.",
        epilog="Exit status: 0 every submission was looked at, 2 there is nothing to grade, 130 ended by Ctrl-C.",
    )
    parser.add_argument("submissions", type=Path, help="a folder with <student>/<lesson>/<lesson>.ipynb")
    parser.add_argument("--into", type=Path, help="where all that is written goes "
                        "(default: class/ in the course's folder, where formgrader looks for it)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)) if LINUX else os.cpu_count(),
                        help="submissions at a time (default: one for each core, %(default)s)")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="grade also what was graded before and has not changed")
    parser.add_argument("--trust-submissions", action="store_true",
                        help="run them without a box: they can read and change all that you can")  # fmt: skip
    args = parser.parse_args(argv)
    try:
        need_nbgrader()
        from ddp_course.grading.instructor.whole_class import WholeClass

        root = course_root()
        if not args.submissions.is_dir():
            raise RuntimeError(f"{args.submissions} is not a folder; it holds <student>/<lesson>/<lesson>.ipynb")
        if args.workers < 1:
            raise RuntimeError(f"--workers {args.workers} cannot grade anything; give at least 1")
        way = "" if args.trust_submissions else box_here()
        into = args.into or root / CLASS
        with WholeClass(root, args.submissions, into, args.workers, way, args.again) as whole_class:
            if not whole_class.digests:
                raise RuntimeError(f"no submissions in {args.submissions}; expected <student>/<lesson>/<lesson>.ipynb")
            for name in whole_class.classroom.misnamed():
                allowed = "letters, digits, spaces and . _ @ + -"
                print(f"{name!r} is not graded: rename the folder; a student's name has {allowed}", file=sys.stderr)
            print_grades(whole_class)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what is shown above is kept, and the same command goes on from there", file=sys.stderr)
        return 130
    return 0


def box_here() -> str:
    """Return the way in which boxes are made here.

    Raises:
        RuntimeError: there is none; says why, and what can be done.
    """
    from ddp_course.grading.sandbox.box import way_here

    way, reasons = way_here()
    if not way:
        raise RuntimeError(
            f"submissions are programs, and no box can be made around them here ({reasons}).\n"
            "Install bubblewrap (Debian, Ubuntu: apt install bubblewrap), or allow user namespaces. "
            "If you trust every submission: --trust-submissions"
        )
    return way


def print_grades(whole_class) -> None:
    """Grade all, and print a line for each submission as soon as it is done."""
    from tqdm import tqdm

    from ddp_course.grading.instructor.class_report import write_report
    from ddp_course.grading.instructor.marks import write_marks

    width = max(9, *(len(student) for student, _ in whole_class.digests))
    before, started = len(whole_class.done), time.monotonic()
    with tqdm(total=len(whole_class.digests), initial=before, unit="submission", disable=None) as bar:
        if before:
            bar.write(f"{before} of {len(whole_class.digests)} were graded before and have not changed")
        if before < len(whole_class.digests):
            bar.write("first the course's own solutions, to see whether this machine can grade")
        try:
            for graded in whole_class.grade():
                bar.write(f"{graded.student:{width}} {row(graded, exercises_of(graded.lesson))}")
                for note in graded.notes:
                    bar.write(f"{'':{width}}   {note}")
                bar.update()
        finally:
            submissions = whole_class.graded()
            tables = write_marks(submissions, whole_class.into)
            report = write_report(submissions, whole_class.into)
    print(f"graded in {time.monotonic() - started:.0f} s")
    print(f"points: {', '.join(map(str, tables))}, and for formgrader {whole_class.into / 'gradebook.db'}")
    print(f"the class: {report}")
    print(f"feedback: {whole_class.into / 'feedback'}")


def row(graded, exercises) -> str:
    if graded.reason:
        return f"{graded.lesson}  not graded: {graded.reason}"
    cells = [f"{exercise.id} {graded.points[exercise.id]:g}/{exercise.points}" for exercise in exercises]
    total = f"{sum(graded.points.values()):g}/{sum(exercise.points for exercise in exercises)}"
    return "  ".join([graded.lesson, *cells, f"total {total}"])
