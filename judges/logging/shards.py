"""Unequal shards for the exercises of lesson 09, and the wrong ways to their mean.

Losses have multiples of 1/1024 as values, so that a sum in float32 or float64, in any order, is the same number.
Read next: `mean.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import torch

SAME = 1e-5  # of the expected number: what float32 may leave

SKIPPED = {
    r"never entered|lost the connection|disagree about collective|waited in": "one rank skips a collective that the "
    "others wait in; every rank must join, the ranks without rows too, so no collective below `if rank == 0` or "
    "`if len(...)`"
}


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


def mean_slips(parts: Sequence[torch.Tensor], rank: int) -> Iterator[tuple[str, float]]:
    """Yield wrong ways to the mean of all rows, and where each leads. Parts: the rows of each rank."""
    sums, counts = [part.double().sum().item() for part in parts], [len(part) for part in parts]
    means = [total / count for total, count in zip(sums, counts, strict=True) if count]
    total, own = sum(sums), max(counts[rank], 1)
    weigh = "this is the mean of the ranks' means; ranks have different numbers of rows: reduce sums and counts"
    yield weigh, sum(means) / len(means)
    yield weigh, sum(means) / len(parts)
    yield "this is the mean of this rank's rows alone; the other ranks' rows are missing", sums[rank] / own
    yield "the sum of all ranks is divided by this rank's count; reduce the counts", total / own
    yield "the sum is divided by the number of ranks; divide it by the number of all rows", total / len(parts)
    yield "this is the sum over all rows; divide it by the number of all rows", total
    yield "the means are added up over the ranks; reduce sums and counts, then divide once", sum(means)
    yield "a rank without rows counts 0 rows, not 1", total / sum(max(count, 1) for count in counts)
    yield "this is the mean of rank 0's rows alone; reduce sums and counts over all ranks", means[0]
