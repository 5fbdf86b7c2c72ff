"""The command `ddp-course scale`: what do more ranks bring on this machine, and where does the rest of the time go?

It measures each number of ranks in turn, several rounds long, and prints a table with intervals, a sentence on what is
missing, and what the messages between the ranks cost. Given a file, it draws all of it.

Exit status: 0 it was measured, 1 the ranks failed, 2 the command was not understood, 130 ended by Ctrl-C.

Read next: `scaling/measure.py`, which does the measuring.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from pathlib import Path

from ddp_course.groups import usable_cores
from ddp_course.launcher import RankError
from ddp_course.scaling.collective_cost import COLLECTIVES, SIZES, CollectiveCost, measure_collectives
from ddp_course.scaling.efficiency import MODES, WIDTH, Scaling
from ddp_course.scaling.link import LINKS
from ddp_course.scaling.measure import REPLICAS, Workload, measure_scaling
from ddp_course.train.config import MODELS

BUSY = 0.25  # load per core above which the figures are marked
QUICK_SIZES = SIZES[::2]


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = build_parser()
    options = parser.parse_args(argv)
    rounds = 3 if options.quick else options.repeats
    try:
        workload = workload_of(options)
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # before our own ranks add to it
        scaling = measure_scaling(
            options.world_size,
            workload,
            mode=options.mode,
            repeats=rounds,
            steps=5 if options.quick else options.steps,
            after_round=lambda done: None if options.json else said(f"round {done} of {rounds}"),
        )
        costs = collective_costs(options)
    except ValueError as error:
        parser.error(str(error))
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the ranks have been ended on the way here
        said("")
        print("ended by Ctrl-C; no rank is left", file=sys.stderr)
        return 130
    said("")
    print(json.dumps(as_json(scaling, costs, load)) if options.json else as_text(scaling, costs, load))
    if options.png:
        draw(scaling, costs, options.png)
        if not options.json:
            print(f"\ndrawn: {options.png}")
    return 0


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddp-course scale",
        description="Measure training on several numbers of ranks of this machine: throughput, efficiency with its "
        "95 % interval, the parts of a step, and what the messages cost.",
        formatter_class=_Defaults,
    )
    parser.add_argument(
        "--world-size",
        type=world_sizes,
        default="1,2",
        metavar="N,N",
        help="numbers of ranks; the smallest is the base",
    )
    parser.add_argument(
        "--mode", choices=MODES, default="weak", help="weak: each rank has the batch; strong: all ranks divide it"
    )
    parser.add_argument("--model", choices=MODELS, default="mlp", help="the network")
    parser.add_argument("--hidden", type=positive, default=1024, help="width of the MLP's hidden layers")
    parser.add_argument("--batch", type=positive, default=64, help="rows in a backward pass")
    parser.add_argument("--accumulation", type=positive, default=1, help="backward passes in one step")
    parser.add_argument("--replica", choices=REPLICAS, default="torch", help="torch's DDP, the course's, or no overlap")
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="size at which a bucket closes, in MiB")
    parser.add_argument("--link", choices=sorted(LINKS), help="send through a simulated link, as slow as this one")
    parser.add_argument("--repeats", type=positive, default=7, help="rounds; more of them narrow the intervals")
    parser.add_argument("--steps", type=positive, default=20, help="steps in one round, after a warm-up")
    parser.add_argument(
        "--collectives", type=names_of_collectives, default="all_reduce", metavar="NAME,NAME",
        help=f"which messages to measure: {', '.join(COLLECTIVES)}, all, or none",
    )  # fmt: skip
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw curve, split and fits into this file")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the tables")
    parser.add_argument("--quick", action="store_true", help="few rounds, steps and sizes: to see that it works")
    return parser


def world_sizes(text: str) -> list[int]:
    """Read "1,2,4"; the words of the error are for argparse, which shows them."""
    sizes = sorted({positive(part) for part in text.split(",")})
    if len(sizes) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is one number of ranks: give two or more, such as 1,2")
    return sizes


def positive(text: str) -> int:
    """Read a whole number from 1 on."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def names_of_collectives(text: str) -> list[str]:
    """Read "all_reduce,broadcast"."""
    names = {"all": list(COLLECTIVES), "none": []}.get(text, text.split(","))
    if unknown := [name for name in names if name not in COLLECTIVES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not known: give some of {', '.join(COLLECTIVES)}")
    return names


def workload_of(options: argparse.Namespace) -> Workload:
    link = LINKS[options.link] if options.link else None
    return Workload(
        model=options.model,
        hidden=options.hidden,
        batch=options.batch,
        accumulation=options.accumulation,
        replica=options.replica,
        bucket_mb=options.bucket_mb,
        link=link,
    )


def collective_costs(options: argparse.Namespace) -> list[CollectiveCost]:
    """Measure the collectives between the largest number of ranks."""
    if not options.collectives:
        return []
    sizes, rounds = (QUICK_SIZES, 1) if options.quick else (SIZES, 5)
    return list(measure_collectives(max(options.world_size), options.collectives, sizes, rounds=rounds).values())


def as_text(scaling: Scaling, costs: list[CollectiveCost], load: float) -> str:
    """The tables and sentences that a person reads."""
    lines = [scaling.table(), ""]
    lines += [textwrap.fill(scaling.explain(size), WIDTH) for size in scaling.world_sizes[1:]]
    lines += ["", *scaling.notes, *busy(load)]
    for cost in costs:
        sentence, *rows = cost.table().splitlines()
        lines += ["", textwrap.fill(sentence, WIDTH), *rows]
    return "\n".join(lines)


def as_json(scaling: Scaling, costs: list[CollectiveCost], load: float) -> dict:
    explained = [scaling.explain(size) for size in scaling.world_sizes[1:]]
    machine = {"cores": usable_cores(), "load_before": load, "busy": bool(busy(load))}
    return {
        **scaling.as_json(),
        "explained": explained,
        "collectives": [c.as_json() for c in costs],
        "machine": machine,
    }


def busy(load: float) -> list[str]:
    if load <= BUSY * usable_cores():
        return []
    return [f"the machine was busy before (load {load:.1f} on {usable_cores()} cores): the figures are distorted"]


def draw(scaling: Scaling, costs: list[CollectiveCost], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from ddp_course.draw.scaling import scaling_report

    path.parent.mkdir(parents=True, exist_ok=True)
    scaling_report(scaling, costs).savefig(path)


def said(text: str) -> None:
    """Show progress on one line of a terminal; a file or a pipe gets none."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
