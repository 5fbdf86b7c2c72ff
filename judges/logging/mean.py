"""09.1 `mean_loss(rank, world_size, losses)`: is it the mean over all rows, on every rank, with little talk?

Read `shards.py` first. Read next: `writer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

from ddp_course.grading import observe
from ddp_course.grading.compare import close, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from ddp_course.launcher.failure import describe
from judges.logging.shards import (
    SAME,
    SKIPPED,
    guessed,
    losses,
    mean_guesses,
    talk_fault,
    unequal,
)

Parts = list[torch.Tensor]  # the rows of each rank
MANY_ROWS = 600  # so many that rows on the way cannot be taken for sums


def mean_driver(rank: int, world_size: int, function: Callable, cases: list[Parts]) -> list[dict]:
    """Call the function for each case with this rank's rows; note what it returned or refused, and its collectives."""
    notes = []
    for parts in cases:
        note: dict[str, Any] = {}
        with observe.Collectives() as seen:
            try:
                note["mean"] = plain(function(rank, world_size, parts[rank].clone()))
            except (ValueError, ZeroDivisionError, AssertionError) as error:
                if any(map(len, parts)):
                    raise
                note |= {"error": type(error).__name__, "story": describe(error, 0).story}
        notes.append({**note, "calls": seen.calls})
    return notes


def mean_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Unequal shards first; then a rank without rows, at either end; then no rows at all."""
    world_size = rng.choice((3, 4))
    parts = [losses(rng, rows) for rows in unequal(rng, world_size, least=MANY_ROWS)]
    notes = [note[0] for note in answer.run(mean_driver, world_size, [parts], init=True)]
    yield "mean", _first_fault(parts, notes)
    faults = (talk_fault(n["calls"], 2, 4 * len(parts[r]), r, "sums and counts") for r, n in enumerate(notes))
    yield "few", next(filter(None, faults), None)
    yield "empty", _empty_fault(answer, rng, 5 - world_size // 2)  # 4, 3
    ranks = answer.run(mean_driver, 2, [[torch.zeros(0)] * 2], init=True)
    yield "nothing", next(filter(None, (_nothing_fault(rank, note[0]) for rank, note in enumerate(ranks))), None)


def _empty_fault(answer: Answer, rng: Random, world_size: int) -> Fault | None:
    """Take the rows from the last rank, from rank 0, and from all but one."""
    sizes = unequal(rng, world_size, least=3, step=5)
    cases = []
    for without in ([world_size - 1], [0], range(1, world_size)):
        cases.append([losses(rng, 0 if rank in without else rows) for rank, rows in enumerate(sizes)])
    ranks = answer.run(mean_driver, world_size, cases, init=True)
    faults = (_first_fault(parts, [notes[index] for notes in ranks]) for index, parts in enumerate(cases))
    return next(filter(None, faults), None)


def _first_fault(parts: Parts, notes: list[dict]) -> Fault | None:
    return next(filter(None, (_mean_fault(parts, rank, note["mean"]) for rank, note in enumerate(notes))), None)


def _mean_fault(parts: Parts, rank: int, found: Any) -> Fault | None:
    right = torch.cat(parts).double().mean().item()
    if close(found, right, SAME) and not isinstance(found, list):
        return None
    expected = f"{right:.4f}, the mean of {' + '.join(str(len(part)) for part in parts)} rows"
    if found is None:
        cause = "every rank must return the mean; note that all_reduce works in place and returns None"
    elif isinstance(found, list | str | bool):
        cause = "return one number: the mean over all rows"
    elif found != found:
        cause = "nan: the mean of no rows is 0 divided by 0, and spreads to all; send sum and count, which are 0 then"
    else:
        otherwise = "the mean is the sum over all ranks / the count over all ranks, and `reduce` leaves it on dst only"
        cause = guessed(found, mean_guesses(parts, rank), otherwise)
    return Fault(expected, short(found), rank, cause)


def _nothing_fault(rank: int, note: dict) -> Fault | None:
    if note.get("error") == "ValueError":
        return None
    expected = "ValueError on every rank, where no rank has a row"
    if "error" in note:
        return Fault(expected, report=note["story"], cause="look at the count over all ranks, then raise ValueError")
    if note["mean"] == 0:
        cause = "a loss of 0 looks like a perfect model; a count of 0 has no mean, so raise ValueError"
    else:
        cause = "0 divided by 0 is nan for tensors; look at the count over all ranks before you divide"
    return Fault(expected, short(note["mean"]), rank, cause)


MEAN = Exercise(
    "09.1",
    "The mean over all rows",
    "mean_loss",
    10,
    (
        Check("mean", "every rank has the mean over all rows", 2),
        Check("few", "sums and counts travel, in at most two collectives", 1),
        Check("empty", "a rank without rows joins, and does no harm", 1),
        Check("nothing", "no rows at all are refused", 1),
    ),
    mean_judge,
    refused=("ddp_course.metrics.mean_over_ranks", "ddp_course.metrics.MeanMetrics"),
    hints=(
        (
            r"raised (ValueError|ZeroDivisionError|AssertionError)",
            "other ranks have rows here, so there is a mean; a rank without rows sends a sum of 0 and a count of 0, "
            "and looks at the count over all ranks, which all_reduce brings to every rank",
        ),
        (
            r"different sizes|(?i:mismatch)",
            "all_reduce adds tensors of one shape, but ranks have different numbers of rows; send sum and count",
        ),
        SKIPPED,
    ),
)
