"""How do people get the mean over all ranks' rows wrong, when the ranks have different numbers of rows?

Read next: `judges/logging/mean.py`, which asks for this mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def mean_slips(parts: Sequence[torch.Tensor], rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield wrong ways to the mean of all rows, and where each leads.

    Args:
        parts: the rows of each rank, (N, ...); maybe none on some.
        rank: whose result it is.
    """
    sums, counts = [part.double().sum(0) for part in parts], [len(part) for part in parts]
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
