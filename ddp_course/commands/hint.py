"""What helps with an exercise, short of its solution? `ddp-course hint 07.2` prints the hint that its text folds away.

Read next: `solution.py`.
"""

from __future__ import annotations

import argparse
import sys

from ddp_course.grading.learner.exercise_texts import hint


def main(argv: list[str]) -> int:
    """Print a hint; return 0, or 2 where there is no such exercise."""
    parser = argparse.ArgumentParser(prog="ddp-course hint", description="Print the hint of an exercise.")
    parser.add_argument("exercise", help="an exercise, such as 07.2")
    exercise = parser.parse_args(argv).exercise
    try:
        print(hint(f"{exercise:0>4}"))  # "7.2" is 07.2
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
