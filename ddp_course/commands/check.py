"""How are the saved answers of a lesson checked in a terminal? `ddp-course check 03`, or `03.2` for one exercise.

Read next: `grading/learner/terminal.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ddp_course.grading.learner.terminal import check_notebook, chosen_exercises
from ddp_course.grading.paths import learners_root
from ddp_course.grading.registry import notebook_of


def main(argv: list[str]) -> int:
    """Check the saved answers; return 0 for full marks, 1 for less, 2 when there is nothing to check."""
    parser = argparse.ArgumentParser(
        prog="ddp-course check",
        description="Check the saved answers of a lesson.",
        epilog="Exit status: 0 full marks, 1 less, 2 there is nothing to check.",
    )
    parser.add_argument("exercise", help="a lesson, such as 03, or one exercise, such as 03.2")
    parser.add_argument("--notebook", type=Path, help="another notebook than the one in exercises/")
    parser.add_argument("--seed", type=int, default=0, help="check with other values (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, with what each check said")
    args = parser.parse_args(argv)
    try:
        lesson, dot, number = args.exercise.partition(".")
        what = f"{lesson:0>2}{dot}{number}"  # "3" is lesson 03
        exercises = chosen_exercises(what)
        path = args.notebook or notebook_of(what, learners_root())
        said: list[str] = []
        points = check_notebook(path, exercises, args.seed, say=said.append if args.json else print)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    total, full = sum(points.values()), sum(exercise.points for exercise in exercises)
    if args.json:
        of = {exercise.id: exercise.points for exercise in exercises}
        each = [{"exercise": name, "points": points.get(name, 0.0), "of": of[name]} for name in of]
        print(json.dumps({"notebook": str(path), "points": total, "of": full, "exercises": each, "said": said}))
    else:
        print(f"{path.name}: {total:g} of {full} points")
    return 0 if total == full else 1
