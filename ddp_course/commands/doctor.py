"""What is missing or wrong on this machine, said before a lesson or a job stumbles over it?

    ddp-course doctor                                                # this machine
    ddp-course doctor --world-size 2 --rendezvous 10.0.0.1:29500     # on each of two: they meet

The verdicts are told as a table or as JSON, with an exit status. All but the meeting uses the standard library alone.
If torch is too broken for `ddp-course` to start, run this file by its path: python ddp_course/commands/doctor.py
Read next: `diagnose/doctor.py`; `diagnose/meeting.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from dataclasses import asdict
from pathlib import Path

if not __package__:  # run by its path: the package's own __init__ imports torch, so an empty package stands in for it
    sys.modules["ddp_course"] = types.ModuleType("ddp_course")
    sys.modules["ddp_course"].__path__ = [str(Path(__file__).resolve().parents[1])]

from ddp_course.diagnose.doctor import diagnose
from ddp_course.diagnose.facts import gather_facts
from ddp_course.diagnose.verdict import exit_status, table


def main(argv: list[str]) -> int:
    """Print the verdicts; return 1 if there is a problem, else 0."""
    options = read_options(argv)
    if options.rendezvous:
        try:
            from ddp_course.diagnose import meeting
        except (ImportError, OSError, RuntimeError) as error:
            print(f"a meeting needs a torch that works ({error}); run the doctor without --rendezvous", file=sys.stderr)
            return 1
        return meeting.run(options.world_size, options.rendezvous, options.timeout, options.megabytes, options.json)
    verdicts = diagnose(gather_facts(options.checkpoint))
    print(json.dumps([asdict(verdict) for verdict in verdicts], indent=2) if options.json else table(verdicts))
    return exit_status(verdicts)


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ddp-course doctor",
        description="Say what is missing or wrong on this machine, or between several machines.",
        epilog="Between machines: run the same line on each, with the address of one of them: "
        "ddp-course doctor --world-size 2 --rendezvous 10.0.0.1:29500. "
        "Exit status: 0 no problem, warnings or not; 1 a problem; 2 wrong options.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="try this folder for checkpoints too")
    parser.add_argument("--world-size", type=int, metavar="N", help="how many machines meet")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where: an address of one of them and a free port")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds for the meeting (30)")
    parser.add_argument("--megabytes", type=float, default=16.0, metavar="MB", help="largest all_reduce measured (16)")
    options = parser.parse_args(argv)
    if (options.world_size is None) != (options.rendezvous is None):
        parser.error("--world-size N and --rendezvous HOST:PORT go together")
    if options.world_size is not None and options.world_size < 2:
        parser.error("--world-size counts the machines that meet: 2 or more")
    if not 1 <= options.timeout <= 3600:
        parser.error("--timeout is from 1 to 3600 seconds")
    if not 0 < options.megabytes <= 1024:
        parser.error("--megabytes is above 0, and 1024 at most")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
