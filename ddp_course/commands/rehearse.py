"""The command `ddp-course rehearse`: run a learner's own program on CPU ranks, and say what is right and wrong.

    ddp-course rehearse train.py --epochs 2
    ddp-course rehearse --ranks 4 --json train.py --epochs 2
    ddp-course rehearse --certify certificate.json --resume-with "--resume run.pt" train.py

What stands after the script belongs to the script. It runs in a copy of its folder, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import textwrap
from pathlib import Path

from ddp_course.cli import in_words
from ddp_course.rehearsal.certify import certify
from ddp_course.rehearsal.finding import WRONG
from ddp_course.rehearsal.rehearse import Rehearsal, cause_of, rehearse


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="ddp-course rehearse",
        description="Run a DDP program on ranks of this machine and say what is wrong.",
        epilog="Exit status: 0 nothing wrong, 1 something wrong, 2 the program could not be started.",
    )
    parser.add_argument("--ranks", type=int, default=2, help="how many (2)")
    parser.add_argument("--limit", type=float, default=300.0, help="the longest that a run may take, in seconds (300)")
    parser.add_argument(
        "--wait", type=float, default=20.0, help="the longest wait of a rank for others, in seconds (20)"
    )
    parser.add_argument("--verbose", action="store_true", help="also what this program gave no occasion to see")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--certify", metavar="FILE.json", help="write what was measured there, and print it in a line")
    parser.add_argument("--resume-with", default="", help="arguments that are added after a kill, as --resume")
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    if "--resume-with" in argv[:-1]:  # argparse takes --resume, which comes next, for an option of ours
        at = argv.index("--resume-with")
        argv = [*argv[:at], f"--resume-with={argv[at + 1]}", *argv[at + 2 :]]
    options = parser.parse_args(argv)
    file = Path(options.certify) if options.certify else None
    if file:
        if file.suffix != ".json" or options.ranks < 2:
            parser.error("--certify takes a file that ends in .json, and 2 ranks or more")
        file.write_text("")  # can it be written, and no old one speaks for this run
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the ranks that this process starts
    try:
        run = certify if file else rehearse
        found = run(
            options.script,
            options.arguments,
            world_size=options.ranks,
            limit_s=options.limit,
            wait_s=options.wait,
            say=lambda text: print(f"rehearse: {text}", file=sys.stderr, flush=True),
            resume_with=shlex.split(options.resume_with),
        )
    except (OSError, SyntaxError, ValueError) as error:
        print(f"{options.script}: cannot be rehearsed: {in_words(error)}", file=sys.stderr)
        return 2
    if file:
        file.write_text(found.certificate.as_json())
    if options.json:
        told = {"findings": [each.as_json() for each in found.findings], "right": found.right, "unseen": found.unseen}
        print(json.dumps({"script": options.script, "failure": found.failure, "status": found.status, **told}))
    else:
        print(report(found, options.script, options.ranks, options.verbose))
        if file:
            print(f"certificate: {found.certificate.line()}")
    return found.status


def report(found: Rehearsal, script: str, ranks: int, verbose: bool = False) -> str:
    """Return what a person reads."""
    parts = [each.show(script) for each in found.findings]
    if found.failure:
        cause = cause_of(found.failure)
        parts.append(f"{script} did not run to its end on {ranks} ranks" + (f": {cause}" if cause else ""))
        parts.append(textwrap.indent(found.failure, "    "))
    elif not any(each.grade == WRONG for each in found.findings):
        parts.append(f"{script}: nothing wrong was seen on 1 rank and on {ranks}")
    for words, faults in (("looked for, and not there", found.right), (UNSEEN, found.unseen if verbose else ())):
        if faults:
            parts.append(
                textwrap.fill(f"{words}: {', '.join(faults)}", 100, subsequent_indent="    ", break_on_hyphens=False)
            )
    return "\n".join(parts)


UNSEEN = "this program gave no occasion to see (it has no such part, or no two runs that could be compared)"
