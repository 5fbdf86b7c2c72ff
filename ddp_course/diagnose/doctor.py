"""What is missing or wrong on this machine, said before a lesson or a job stumbles over it?

`gather_facts` looks around, each check turns facts into a verdict, and here they are told: as a table or as JSON,
with an exit status. With `--rendezvous` several machines meet instead; see `meeting.py`.

All but the meeting uses the standard library alone. If torch is too broken for `ddp-course doctor` to start, run
this file by its path: python ddp_course/diagnose/doctor.py
Read next: `facts.py`, then `checks.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from dataclasses import asdict
from pathlib import Path

if not __package__:  # run by its path: the package's own __init__ imports torch, so an empty package stands in for it
    HERE = Path(__file__).resolve().parent
    for name, folder in (("ddp_course", HERE.parent), ("ddp_course.diagnose", HERE)):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]

from ddp_course.diagnose import checks, cluster_checks
from ddp_course.diagnose.facts import Facts, gather_facts
from ddp_course.diagnose.verdict import Verdict, exit_status, table

# In the order in which a person would mend things.
CHECKS = (
    checks.check_python,
    checks.check_torch,
    checks.check_torchvision,
    checks.check_gpus,
    checks.check_cuda,
    checks.check_nccl,
    cluster_checks.check_links,
    checks.check_gloo,
    checks.check_loopback,
    cluster_checks.check_interfaces,
    cluster_checks.check_host_name,
    cluster_checks.check_ports,
    checks.check_shared_memory,
    checks.check_cores,
    checks.check_threads,
    checks.check_temp,
    cluster_checks.check_checkpoints,
    checks.check_kernel,
    cluster_checks.check_environment,
)


def diagnose(facts: Facts) -> list[Verdict]:
    """Return one verdict for each check."""
    return [check(facts) for check in CHECKS]


def main(argv: list[str] | None = None) -> int:
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


def read_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ddp-course doctor",
        description="Say what is missing or wrong on this machine, or between several machines.",
        epilog="Between machines: run the same line on each, with the address of one of them: "
        "ddp-course doctor --world-size 2 --rendezvous 10.0.0.1:29500",
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
    sys.exit(main())
