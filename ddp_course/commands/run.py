"""Run a program as it is, and say which rank, which call and which line when it hangs or dies.

ddp-course run -- torchrun --nproc-per-node 4 train.py
ddp-course run --limit 60 -- python train.py             # one that starts its ranks itself
"""

from __future__ import annotations

import argparse
import math
import sys

from ddp_course.cli import in_words


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="ddp-course run",
        usage="%(prog)s [--limit S] -- PROGRAM ...",
        description="Run a program as it is, with gloo or NCCL, and say which rank, which call and which line when it "
        "hangs or dies. Until then it runs as without this. The report goes to the standard error; its last line is "
        "for programs.",
        epilog="Exit status: 0, or another, as the program's own; 128 and its number if a signal ended it; 124 no rank "
        "moved, and the program was ended; 2 the command was not understood or cannot be started. A rank moves if its "
        "line or its calls change, or if it computes; one that waits for another does not. While a rank still computes "
        "the program is left to run, and the report says who waits for it.",
    )
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="seconds without a move (default: 300)")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="PROGRAM", help="torchrun ..., or python train.py ..."
    )
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command or not (options.limit > 0 and math.isfinite(options.limit)):
        parser.error("which program? Give it after --, such as: -- torchrun --nproc-per-node 4 train.py"
                     if not command else "--limit must be a number of seconds, more than 0")  # fmt: skip
    from ddp_course.observe.program import NotStarted, run

    try:
        return run(command, options.limit, lambda text: print(f"\nddp-course run: {text}", file=sys.stderr, flush=True))
    except NotStarted as error:
        print(f"{command[0]}: cannot be started: {in_words(error.__cause__)}", file=sys.stderr)
    except OSError as error:
        print(f"ddp-course run: cannot watch: {in_words(error)}", file=sys.stderr)
    return 2
