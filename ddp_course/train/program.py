"""How does one program run on ranks from a terminal, whoever starts the ranks?

A program is a function `work(rank, world_size, config)`, a dataclass whose fields are its options, and a summary of the
results. Called by hand, it starts the ranks itself, through `launch`. Under torchrun, and under any launcher that sets
RANK, the ranks are running already, and each of them is in this file: it joins the group and gathers the results.

Exit status: 0; 1 if the training failed or its replicas differ; 2 for wrong options; and 143, as of a program ended by
SIGTERM, if it was asked to stop and has saved: a scheduler then knows that it has to be started again.

Left out on purpose: what each program trains.
Read next: `terminal.py`, the first of the programs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, fields
from typing import Any

import torch.distributed as dist

from ddp_course.checkpoint.folder import CheckpointError
from ddp_course.data import DatasetError
from ddp_course.groups import process_group, read_place
from ddp_course.launcher import RankError, RankPool
from ddp_course.launcher.watchdog import Watchdog

STOPPED = 128 + signal.SIGTERM
FORWARDED = (signal.SIGTERM, signal.SIGUSR1)  # to every rank; see cadence.py
RANKS = 2  # if nobody says how many to start
SENTENCES = (CheckpointError, DatasetError)  # their message says it all; a traceback would bury it

Work = Callable[[int, int, Any], Any]


def add_options(parser: argparse.ArgumentParser, config_class: type) -> argparse.ArgumentParser:
    """Give `parser` an option for each field of the dataclass, and three that say where to run and how to tell.

    A field's metadata has its "help", and may have its "choices".
    """
    parser.add_argument("--world-size", type=int, help=f"ranks to start (default: {RANKS}, or torchrun's)")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="nccl if every rank has a GPU, else gloo")
    parser.add_argument("--json", action="store_true", help="print the result of each rank as JSON")
    for each in fields(config_class):
        flag, default, says = f"--{each.name.replace('_', '-')}", each.default, each.metadata["help"]
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=says)
        else:
            kind, choices = str if default is None else type(default), each.metadata.get("choices") or None
            parser.add_argument(flag, type=kind, default=default, choices=choices, help=says)
    return parser


def run_program(
    parser: argparse.ArgumentParser,
    config_class: type,
    work: Work,
    summary: Callable[[Any, list], str],
    stopped: Callable[[Any, list], bool] = lambda config, results: False,
    argv: list[str] | None = None,
) -> int:
    """Run `work` on ranks with the options in `argv`, and let rank 0 tell what came of it.

    Args:
        work: returns a dataclass with a `checksum` of its replica.
        summary: what rank 0 prints, from the config and the results.
        stopped: whether a signal ended the run before its end.
    Returns:
        The exit status.
    """
    options = parser.parse_args(argv)
    try:
        config = config_class(**{each.name: getattr(options, each.name) for each in fields(config_class)})
        results = (join_ranks if "RANK" in os.environ else start_ranks)(work, config, options)
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
    return STOPPED if stopped(config, results) else 0


def fail(message: str) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)
    return 1


def replicas_are_equal(results: list) -> bool:
    return len({result.checksum for result in results}) <= 1


def equality(results: list) -> str:
    """Return a line on the replicas: equal, or each rank's checksum."""
    if replicas_are_equal(results):
        return f"the replicas are equal: {results[0].checksum}"
    return "THE REPLICAS DIFFER: " + ", ".join(f"rank {r.rank} {r.checksum}" for r in results)


# --- The two ways to come to ranks -----------------------------------------------------------------


def start_ranks(work: Work, config: Any, options: argparse.Namespace) -> list:
    """Start the ranks here; signals go on to them where there is something to save."""
    world_size = RANKS if options.world_size is None else options.world_size
    pids: list[int] = []
    settings = {"backend": options.backend, "timeout_s": _patience(config), "quiet": options.json}
    saves = getattr(config, "checkpoint", None)
    with forwarding(pids) if saves else nullcontext(), RankPool(world_size, **settings) as ranks:
        pids += ranks.pids
        return ranks.run(_started, (work, config))


def join_ranks(work: Work, config: Any, options: argparse.Namespace) -> list:
    """Be one rank of a job that a launcher has started.

    Returns:
        Every rank's result on rank 0; its own on the others, to end with the same status.
    Collective: the group's opening and end, all of `work`, one gather_object; every rank.
    """
    expected = read_place(backend=options.backend).world_size
    if options.world_size not in (None, expected):
        raise ValueError(
            f"--world-size {options.world_size}, but the launcher has started {expected} ranks; leave it out"
        )
    hang_report = getattr(config, "hang_report", 0.0)
    watchdog = Watchdog(hang_report) if hang_report else nullcontext()
    timeout_s = getattr(config, "timeout_s", 60.0)
    with process_group(backend=options.backend, timeout_s=timeout_s) as place, watchdog:
        result = _started(place.rank, place.world_size, work, config)
        results = [None] * place.world_size if place.rank == 0 else None
        dist.gather_object(result, results)
        gc.collect()  # DDP's object ends while its group is there; later, its threads may abort the process
    return results or [result]


def _patience(config: Any) -> float:
    return getattr(config, "hang_report", 0.0) or getattr(config, "timeout_s", 60.0)


def _started(rank: int, world_size: int, work: Work, config: Any) -> Any:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the work listens, there is nothing to save
    return work(rank, world_size, config)


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
