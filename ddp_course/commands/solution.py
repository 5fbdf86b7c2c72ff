"""What is one right answer? `ddp-course solution 07.2`, after a try of your own; `--anyway` shows it without one.

Read next: `grading/learner/exercise_texts.py`.
"""

from __future__ import annotations

import argparse
import sys

from ddp_course.grading.learner.exercise_texts import solution, tried


def main(argv: list[str]) -> int:
    """Print the course's answer; return 0, 1 where nothing was tried yet, 2 where there is no such exercise."""
    parser = argparse.ArgumentParser(
        prog="ddp-course solution",
        description="Print one right answer of an exercise.",
        epilog="Exit status: 0 printed, 1 nothing was tried yet, 2 there is no such exercise.",
    )
    parser.add_argument("exercise", help="an exercise, such as 07.2")
    parser.add_argument("--anyway", action="store_true", help="without a try of your own")
    options = parser.parse_args(argv)
    exercise = f"{options.exercise:0>4}"  # "7.2" is 07.2
    try:
        if not options.anyway and not tried(exercise):
            print(f"{exercise} has no answer of yours yet, or it is not saved. Try it first: there is a hint,")
            print(f"`ddp-course hint {exercise}`. To see the solution all the same, add --anyway.")
            return 1
        print(solution(exercise))
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
