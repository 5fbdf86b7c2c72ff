"""How does one program run on ranks from a terminal, whoever starts the ranks?

A program is a function `work(rank, world_size, config)`, a dataclass whose fields are its options, and a summary of the
results; `commands/train.py` has a table of them. Called by hand, it starts the ranks itself, through `launch`. Under
torchrun, and under any launcher that sets RANK, the ranks are running already, and each of them is in this file: it
joins the group and gathers the results.

Exit status: 0; 1 if the training failed or its replicas differ; 2 for wrong options; and 143, as of a program ended by
SIGTERM, if it was asked to stop and has saved: a scheduler then knows that it has to be started again.

Left out on purpose: what each program trains.
Read next: `commands/train.py`, where they are called.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp_course.checkpoint.folder import CheckpointError
from ddp_course.data import DatasetError
from ddp_course.groups import process_group, read_place
from ddp_course.launcher import RankError, RankPool
from ddp_course.launcher.watchdog import Watchdog
from ddp_course.train.config import Options

STOPPED = 128 + signal.SIGTERM
FORWARDED = (signal.SIGTERM, signal.SIGUSR1)  # to every rank; see cadence.py
RANKS = 2  # if nobody says how many to start
SENTENCES = (CheckpointError, DatasetError)  # their message says it all; a traceback would bury it


class Place(NamedTuple):
    """Where to run; None is what the launcher says, or the default."""

    world_size: int | None = None
    backend: str | None = None


@dataclass(frozen=True)
class Program:
    """Something that can be trained from a terminal.

    Args:
        says: one sentence.
        config: its fields are the options.
        work: returns a dataclass with a `checksum` of its replica.
        summary: what rank 0 prints, from the config and the results.
        stopped: whether a signal ended the run before its end.
    """

    says: str
    config: type[Options]
    work: Callable[[int, int, Any], Any]
    summary: Callable[[Any, list], str]
    stopped: Callable[[Any, list], bool] = lambda config, results: False


def run_program(program: Program, config: Any, place: Place, as_json: bool = False) -> int:
    """Run a program on ranks, and let rank 0 tell what came of it.

    Returns:
        The exit status.
    Raises:
        ValueError: the ranks that are asked for cannot be had.
    """
    try:
        results = (join_ranks if "RANK" in os.environ else start_ranks)(program.work, config, place, as_json)
    except SENTENCES as error:
        return fail(str(error))
    except RankError as error:
        told = error.error_type in [known.__name__ for known in SENTENCES]
        return fail(error.message if told else f"{error.report}\n{error.log_line}")
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps([asdict(result) for result in results]) if as_json else program.summary(config, results))
    if not replicas_are_equal(results):
        return 1
    return STOPPED if program.stopped(config, results) else 0


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


def start_ranks(work: Callable, config: Any, place: Place, quiet: bool) -> list:
    """Start the ranks here; signals go on to them where there is something to save."""
    world_size = RANKS if place.world_size is None else place.world_size
    pids: list[int] = []
    settings = {"backend": place.backend, "timeout_s": _patience(config), "quiet": quiet}
    saves = getattr(config, "checkpoint", None)
    with forwarding(pids) if saves else nullcontext(), RankPool(world_size, **settings) as ranks:
        pids += ranks.pids
        return ranks.run(_started, (work, config))


def join_ranks(work: Callable, config: Any, place: Place, quiet: bool) -> list:
    """Be one rank of a job that a launcher has started.

    Returns:
        Every rank's result on rank 0; its own on the others, to end with the same status.
    Collective: the group's opening and end, all of `work`, one gather_object; every rank.
    """
    expected = read_place(backend=place.backend).world_size
    if place.world_size not in (None, expected):
        raise ValueError(
            f"--world-size {place.world_size}, but the launcher has started {expected} ranks; leave it out"
        )
    hang_report = getattr(config, "hang_report", 0.0)
    watchdog = Watchdog(hang_report) if hang_report else nullcontext()
    timeout_s = getattr(config, "timeout_s", 60.0)
    with process_group(backend=place.backend, timeout_s=timeout_s) as here, watchdog:
        result = _started(here.rank, here.world_size, work, config)
        results = [None] * here.world_size if here.rank == 0 else None
        dist.gather_object(result, results)
        gc.collect()  # DDP's object ends while its group is there; later, its threads may abort the process
    return results or [result]


def _patience(config: Any) -> float:
    return getattr(config, "hang_report", 0.0) or getattr(config, "timeout_s", 60.0)


def _started(rank: int, world_size: int, work: Callable, config: Any) -> Any:
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
