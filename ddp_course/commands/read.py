"""The command `ddp-course read`: what did this job die of? From its logs and Flight Recorder dumps.

ddp-course read /shared/run7/logs
ddp-course read slurm-4711.out --json
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

from ddp_course.diagnose.logs import Reading, read


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="ddp-course read",
        description="Read the logs of a job and say what it died of.",
        epilog="Exit status: 0 the cause is named, 1 it is unknown, 2 a file could not be read.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files or folders of one job")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(argv)
    if missing := [path for path in options.paths if not path.exists()]:
        print(f"{missing[0]}: there is no such file or folder", file=sys.stderr)
        return 2
    try:
        found = read(options.paths)
    except OSError as error:
        print(f"{error.filename}: cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(found)) if options.json else told(found))
    return 0 if found.cause else 1


def told(found: Reading) -> str:
    """Return what a person reads."""
    who = "no rank can be blamed" if found.rank is None else f"rank {found.rank}"
    rows = (
        ("cause", found.cause or "unknown"),
        ("rank", who if found.cause else ""),
        ("the others were in", found.collective),
        ("seen", found.evidence),
        ("try", found.cure),
    )
    width = {"width": 100, "subsequent_indent": "    ", "break_on_hyphens": False}
    return "\n".join(textwrap.fill(f"{word}: {text}", **width) for word, text in rows if text)
