"""Unequal shards for the exercises of lesson 09, and what is common to judging them.

Losses have multiples of 1/1024 as values, so that a sum in float32 or float64, in any order, is the same number.
Read next: `mean.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from ddp_course.grading.compare import close
from ddp_course.grading.exercise import Fault
from ddp_course.grading.observe import Call

Guess = tuple[Any, str]  # the number that a mistake leads to, and its name
SAME = 1e-5  # of the expected number: what float32 may leave

SKIPPED = (
    r"never entered|lost the connection|disagree about collective|waited in",
    "one rank skips a collective that the others wait in; every rank must join, the ranks without rows too, "
    "so no collective below `if rank == 0` or `if len(...)`",
)


def unequal(rng: Random, parts: int, least: int, step: int = 7) -> list[int]:
    """Return sizes that all differ, in any order, so that weights and places matter."""
    sizes = [least + index * step + rng.randrange(step) for index in range(parts)]
    sizes[rng.randrange(parts)] += 2 * least  # one part is far larger, so that wrong weights show
    rng.shuffle(sizes)
    return sizes


def losses(rng: Random, rows: int, low: int = 100, high: int = 4000) -> torch.Tensor:
    """Return one loss for each row, in a range that differs from call to call: then means differ, too."""
    start = rng.randrange(low, (low + high) // 2)
    return torch.tensor([rng.randrange(start, high) / 1024 for _ in range(rows)], dtype=torch.float32)


def guessed(found: Any, guesses: Sequence[Guess], otherwise: str) -> str:
    """Return the cause whose number was found."""
    return next((cause for value, cause in guesses if close(found, value, SAME)), otherwise)


def mean_guesses(parts: Sequence[torch.Tensor], rank: int) -> list[Guess]:
    """Return the numbers that wrong ways to the mean of all rows lead to. Parts: the rows of each rank."""
    sums, counts = [part.double().sum().item() for part in parts], [len(part) for part in parts]
    means = [total / count for total, count in zip(sums, counts, strict=True) if count]
    own = sums[rank] / max(counts[rank], 1)
    weigh = "this is the mean of the ranks' means; ranks have different numbers of rows: reduce sums and counts"
    guesses = [
        (sum(means) / len(means), weigh),
        (sum(means) / len(parts), weigh),
        (own, "this is the mean of this rank's rows alone; the other ranks' rows are missing"),
        (sum(sums) / max(counts[rank], 1), "the sum of all ranks is divided by this rank's count; reduce the counts"),
        (sum(sums) / len(parts), "the sum is divided by the number of ranks; divide it by the number of all rows"),
        (sum(sums), "this is the sum over all rows; divide it by the number of all rows"),
        (sum(means), "the means are added up over the ranks; reduce sums and counts, then divide once"),
        (sum(sums) / sum(max(count, 1) for count in counts), "a rank without rows counts 0 rows, not 1"),
    ]
    return [*guesses, (means[0], "this is the mean of rank 0's rows alone; reduce sums and counts over all ranks")]


def talk_fault(calls: Sequence[Call], most: int, row_bytes: int, rank: int, what: str) -> Fault | None:
    """Look at the collectives of one call: are there too many, and do rows travel? A barrier carries nothing."""
    talks = [call for call in calls if call.op != "barrier"]
    expected = f"at most {most} collective{'s' * (most > 1)}, with {what}"
    if not talks:
        return Fault(expected, "no collective", rank, "the ranks never talked")
    if len(talks) > most:
        cause = "each collective has a price of its own; put the numbers into one tensor (all_gather_object makes two)"
        return Fault(expected, f"{len(talks)} collectives", rank, cause)
    n_bytes = sum(call.n_bytes for call in talks)
    if n_bytes < row_bytes:
        return None
    found = f"{n_bytes} bytes, where this rank's rows have {row_bytes}"
    return Fault(expected, found, rank, "the rows travel; add up on each rank first, and send the sums")
