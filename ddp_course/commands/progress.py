"""How far is the learner? `ddp-course progress`: the exercises of each lesson, and the points so far.

Read next: `grading/learner/progress.py`, where the notes of the checks are kept.
"""

from __future__ import annotations

import argparse
import json
import sys

from ddp_course.grading.learner import progress


def main(argv: list[str]) -> int:
    """Show how far the learner is; return 0, or 2 when no notes are kept."""
    parser = argparse.ArgumentParser(
        prog="ddp-course progress",
        description="Show each exercise, and your points.",
        epilog="Exit status: 0, or 2 where no notes are kept.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list: points and tries of each exercise")
    parser.add_argument("--forget", action="store_true", help="delete the notes of all your checks")
    args = parser.parse_args(argv)
    try:
        path = progress.progress_file()
        if path is None:
            raise RuntimeError(f"{progress.VARIABLE} is set and empty, so no notes are kept")
        if args.forget:
            path.unlink(missing_ok=True)
        said = json.dumps(progress.as_json(path)) if args.json else progress.shown(path)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    print(said)
    return 0
