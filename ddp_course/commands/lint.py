"""The command `ddp-course lint`: what is wrong with a DDP program, from its text alone."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ddp_course.cli import in_words
from ddp_course.rehearsal.finding import WRONG
from ddp_course.rehearsal.lint import lint


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="ddp-course lint",
        description="Read a DDP program and say what is wrong.",
        epilog="Exit status: 0 nothing wrong, 1 something wrong, 2 a file could not be read.",
    )
    parser.add_argument("scripts", nargs="+", metavar="SCRIPT", help="a Python file")
    parser.add_argument("--json", action="store_true", help="one JSON object for each finding, a line each")
    options = parser.parse_args(argv)
    status = 0
    for script in options.scripts:
        try:
            findings = lint(Path(script).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError) as error:
            print(f"{script}: {in_words(error)}", file=sys.stderr)
            status = 2
            continue
        for finding in findings:
            print(json.dumps({"script": script, **finding.as_json()}) if options.json else finding.show(script))
        if not findings and not options.json:
            print(f"{script}: nothing found")
        status = max(status, int(any(each.grade == WRONG for each in findings)))
    return status
