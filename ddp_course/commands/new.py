"""How does a learner get a copy of lessons and exercises? `ddp-course new FOLDER`, also from an installed wheel.

`ddp-course lab --folder FOLDER` makes the same copy, and opens it. Read next: `grading/learner/workspace.py`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ddp_course.cli import in_words
from ddp_course.grading.learner.workspace import bring
from ddp_course.grading.paths import course_source


def main(argv: list[str]) -> int:
    """Make the copy, or bring it up to date; return 0, or 1 where it cannot be written."""
    parser = argparse.ArgumentParser(prog="ddp-course new", description="Copy lessons and exercises into a folder.")
    parser.add_argument("folder", type=Path, help="an old copy is brought up to date; what you edited stays")
    folder = parser.parse_args(argv).folder.expanduser().resolve()
    try:
        for sentence in bring(course_source(), folder):
            print(sentence)
    except OSError as error:
        print(f"{folder} cannot be written ({in_words(error)})", file=sys.stderr)
        return 1
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"open it with: ddp-course lab --folder {folder}")
    return 0
