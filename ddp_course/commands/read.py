"""The command `ddp-course read`: what did this job die of? From its logs and Flight Recorder dumps.

ddp-course read /shared/run7/logs
ddp-course read slurm-4711.out --json
ddp-course read /shared/run7/dumps --replay run7.html    # a page to step through, call by call
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ddp_course.cli import in_words
from ddp_course.diagnose.flight import Dump
from ddp_course.diagnose.log_lines import Log
from ddp_course.diagnose.logs import Reading, judged, left_by


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="ddp-course read",
        description="Read the logs of a job and say what it died of.",
        epilog="Exit status: 0 a cause is named, 1 none is (unknown, or no failure), 2 a file could not be read.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files or folders of one job")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--replay", type=Path, metavar="FILE.html", help="write a page that replays the calls or lines")
    options = parser.parse_args(argv)
    for path in options.paths:
        path.stat()  # raises what `cli.py` says of a file that is not there
    logs, dumps = left_by(options.paths)
    found = judged(logs, dumps)
    print(json.dumps(asdict(found)) if options.json else told(found))
    if options.replay:
        print(replayed(logs, dumps, told(found), options.replay), file=sys.stderr)
    return 0 if found.cause else 1


def told(found: Reading) -> str:
    """Return what a person reads."""
    who = "no one rank, or it cannot be told" if found.rank is None else f"rank {found.rank}"
    rows = (
        ("cause", found.cause or "none is known"),
        ("rank", who if found.cause else ""),
        ("the others were in", found.collective),
        ("seen", found.evidence),
        ("try", found.cure),
    )
    width = {"width": 100, "subsequent_indent": "    ", "break_on_hyphens": False}
    return "\n".join(textwrap.fill(f"{word}: {text}", **width) for word, text in rows if text)


def replayed(logs: Sequence[Log], dumps: Mapping[int | None, Dump], words: str, path: Path) -> str:
    """Write the page of a job, with `words` above it; returns what is to be said of it."""
    from ddp_course.draw import events, replay  # the pictures' packages, for this alone

    try:
        return f"replay: {replay(events.of_job(logs, dumps), 'What the job left', words).write(path)}"
    except (OSError, ValueError) as error:
        return f"{path} was not written: {in_words(error)}"
