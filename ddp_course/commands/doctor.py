"""What is missing or wrong on this machine, said before a lesson or a job stumbles over it?

    ddp-course doctor                                                # this machine
    ddp-course doctor --short                                        # in five lines, and two ranks are started
    ddp-course doctor --world-size 2 --rendezvous 10.0.0.1:29500     # on each of two: they meet

The verdicts are told as a table or as JSON, with an exit status. Without `--short` and a meeting this needs the
standard library alone, so it runs where torch is broken.
Read next: `diagnose/machine_checks.py`; `diagnose/reachability.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from ddp_course.diagnose.machine_checks import diagnose
from ddp_course.diagnose.machine_facts import gather_facts
from ddp_course.diagnose.verdict import Verdict, exit_status, table

FIRST = ("Python", "torch", "GPUs", "cores")  # what a learner asks


def main(argv: list[str]) -> int:
    """Print the verdicts; return 1 if there is a problem, else 0."""
    options = read_options(argv)
    if options.rendezvous:
        try:
            from ddp_course.diagnose import reachability
        except (ImportError, OSError, RuntimeError) as error:
            print(f"a meeting needs a torch that works ({error}); run the doctor without --rendezvous", file=sys.stderr)
            return 1
        return reachability.run(options.world_size, options.rendezvous, options.timeout, options.json)
    verdicts = diagnose(gather_facts(options.checkpoint))
    if options.short:
        told = [each for each in verdicts if each.name in FIRST or each.state != "ok"]
        torch_works = next(each.state for each in verdicts if each.name == "torch") != "problem"
        verdicts = [*told, start_two_ranks()] if torch_works else told
    print(json.dumps([asdict(verdict) for verdict in verdicts], indent=2) if options.json else table(verdicts))
    return exit_status(verdicts)


def start_two_ranks() -> Verdict:
    """Say whether ranks start here and can communicate, from a try."""
    from ddp_course.launcher import RankError, launch

    try:
        sums = launch(add_up, 2, backend="gloo", quiet=True)
    except RankError as error:
        return Verdict("ranks", "problem", str(error).splitlines()[0], "ask `ddp-course doctor`")
    return Verdict("ranks", "ok", f"two have started, and each has the sum of 1 and 2: {sums}")


def add_up(rank: int, world_size: int) -> int:
    """Collective: one all_reduce; both ranks."""
    import torch
    import torch.distributed as dist

    mine = torch.tensor(rank + 1)
    dist.all_reduce(mine)
    return mine.item()


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ddp-course doctor",
        description="Say what is missing or wrong on this machine, or between several machines.",
        epilog="Between machines: run the same line on each, with the address of one of them: "
        "ddp-course doctor --world-size 2 --rendezvous 10.0.0.1:29500. "
        "Exit status: 0 no problem, warnings or not; 1 a problem; 2 wrong options.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--short", action="store_true", help="what a learner needs, and whatever is wrong")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="try this folder for checkpoints too")
    parser.add_argument("--world-size", type=int, metavar="N", help="how many machines meet")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where: an address of one of them and a free port")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds for the meeting (30)")
    options = parser.parse_args(argv)
    if (options.world_size is None) != (options.rendezvous is None):
        parser.error("--world-size N and --rendezvous HOST:PORT go together")
    if options.world_size is not None and options.world_size < 2:
        parser.error("--world-size counts the machines that meet: 2 or more")
    if not 1 <= options.timeout <= 3600:
        parser.error("--timeout is from 1 to 3600 seconds")
    return options
