"""How does one training program run from a terminal, whoever starts the ranks?

`ddp-course train` starts them itself, through `launch`. Under torchrun, and under any launcher that sets RANK,
the ranks are running already, and each of them is in this file: it joins the group and gathers the results. Both
ways call the same `train` with the same options and print the same lines.

Exit status: 0, 1 if the training failed or its replicas differ, 2 for wrong options, and 143, as of a program ended by
SIGTERM, if it was asked to stop and has saved: a scheduler then knows that it has to be started again.

Read next: `cli.py`, the other commands.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, fields

import torch.distributed as dist

from ddp_course.checkpoint import CheckpointError
from ddp_course.data import DatasetError
from ddp_course.groups import process_group, read_place
from ddp_course.launch import RankError, RankPool
from ddp_course.launch.watchdog import Watchdog
from ddp_course.train import Config, Result, train

STOPPED = 128 + signal.SIGTERM
FORWARDED = (signal.SIGTERM, signal.SIGUSR1)  # to every rank; see cadence.py
RANKS = 2  # if nobody says how many to start
SENTENCES = (CheckpointError, DatasetError)  # their message says it all; a traceback would bury it


def main(argv: list[str] | None = None) -> int:
    """Run the program with the options in `argv`.

    Returns:
        The exit status.
    """
    parser = options_parser()
    options = parser.parse_args(argv)
    try:
        config = Config(**{each.name: getattr(options, each.name) for each in fields(Config)})
        results = (join_ranks if "RANK" in os.environ else start_ranks)(config, options)
    except ValueError as error:
        parser.error(str(error))
    except SENTENCES as error:
        return fail(str(error))
    except RankError as error:
        told = error.error_type in [known.__name__ for known in SENTENCES]
        return fail(error.message if told else error.report)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps([asdict(result) for result in results]) if options.json else summary(config, results))
    if not replicas_are_equal(results):
        return 1
    return STOPPED if any(result.stopped for result in results) else 0


def fail(message: str) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)
    return 1


def options_parser() -> argparse.ArgumentParser:
    """One option for each field of `Config`, and three that say where to run and how to tell."""
    parser = argparse.ArgumentParser(
        prog="ddp-course train",
        usage="%(prog)s [options]",
        description="Train a network on several ranks. Under torchrun, joins the ranks that are there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--world-size", type=int, help=f"ranks to start (default: {RANKS}, or torchrun's)")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="nccl if every rank has a GPU, else gloo")
    parser.add_argument("--json", action="store_true", help="print the result of each rank as JSON")
    for each in fields(Config):
        flag, default = f"--{each.name.replace('_', '-')}", each.default
        if isinstance(default, bool):
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=default, help=each.metadata["help"]
            )
        else:
            kind = str if default is None else type(default)
            choices = each.metadata["choices"] or None
            parser.add_argument(flag, type=kind, default=default, choices=choices, help=each.metadata["help"])
    return parser


def start_ranks(config: Config, options: argparse.Namespace) -> list[Result]:
    world_size = RANKS if options.world_size is None else options.world_size
    timeout_s = config.hang_report or config.timeout_s
    pids: list[int] = []
    settings = {"backend": options.backend, "timeout_s": timeout_s, "quiet": options.json}
    with forwarding(pids) if config.checkpoint else nullcontext(), RankPool(world_size, **settings) as ranks:
        pids += ranks.pids
        return ranks.run(started, (config,))


def started(rank: int, world_size: int, config: Config) -> Result:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until `train` listens, there is nothing to save
    return train(rank, world_size, config)


@contextmanager
def forwarding(pids: list[int]) -> Iterator[None]:
    """Hand the signals that the ranks act on to each of `pids`, instead of dying of one."""

    def forward(number: int, frame: object) -> None:
        if number == signal.SIGTERM and not pids:
            sys.exit(STOPPED)  # no rank is up yet: nothing to save
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def join_ranks(config: Config, options: argparse.Namespace) -> list[Result]:
    """Be one rank of a job that a launcher has started.

    Returns:
        Every rank's result on rank 0; its own on the others, to end with the same status.
    Collective: the group's opening and end, all of `train`, one gather_object; every rank.
    """
    expected = read_place(backend=options.backend).world_size
    if options.world_size not in (None, expected):
        raise ValueError(
            f"--world-size {options.world_size}, but the launcher has started {expected} ranks; leave it out"
        )
    watchdog = Watchdog(config.hang_report) if config.hang_report else nullcontext()
    with process_group(backend=options.backend, timeout_s=config.timeout_s) as place, watchdog:
        result = started(place.rank, place.world_size, config)
        results = [None] * place.world_size if place.rank == 0 else None
        dist.gather_object(result, results)
        gc.collect()  # DDP's object ends while its group is there; later, its threads may abort the process
    return results or [result]


def replicas_are_equal(results: list[Result]) -> bool:
    return len({result.checksum for result in results}) <= 1


def shown(loss: float | None) -> str:
    return f"{'-':>6}" if loss is None else f"{loss:6.4f}"


def summary(config: Config, results: list[Result]) -> str:
    """Return the story of a run: a line an epoch, then what came of it."""
    first = results[0]
    lines = ["epoch    loss  test" + "".join(f"  rank {result.rank}" for result in results)]
    for i, (loss, accuracy) in enumerate(zip(first.losses, first.accuracies, strict=True)):
        own = "".join(f"  {shown(result.own_losses[i])}" for result in results)
        lines.append(f"{i + 1:5d}  {loss:6.4f}  {accuracy:.1%}{own}")
    ranks = f"{first.world_size} rank{'s' if first.world_size > 1 else ''} on {first.device.partition(':')[0]}"
    lines.append(f"{config.dataset}, {config.model}, {ranks}: {first.accuracy:.1%} of the test rows are right")
    lines.append(f"{first.steps - first.first_step} steps took {first.seconds:.1f} s")
    if first.stopped:
        lines.append(f"stopped by a signal after step {first.steps}, saved; go on with --resume")
    if replicas_are_equal(results):
        lines.append(f"the replicas are equal: {first.checksum}")
    else:
        lines.append("THE REPLICAS DIFFER: " + ", ".join(f"rank {r.rank} {r.checksum}" for r in results))
    return "\n".join(lines)
