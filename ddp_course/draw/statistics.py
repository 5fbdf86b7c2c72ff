"""Which numbers does the backward pass of a normalisation over all ranks need?

Read next: `metrics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from ddp_course.draw.shapes import arrow, box, canvas, finding, label, number
from ddp_course.draw.style import LABEL, SHARED, SMALL, rank_colour


def backward_sums(counts: Sequence[int], local: Sequence[Sequence[float]], whole: Sequence[float]) -> Figure:
    """The two sums of a normalisation's backward: each rank's own, and the means that all ranks make of them.

    Args:
        counts: how many samples each rank has.
        local: the sum of dy, and of dy times n, of each rank.
        whole: their means over the samples of all ranks.
    """
    columns = ("sends", "one all_reduce")
    kept = [f"{count} sample{'s' * (count != 1)}" for count in counts]
    sums = [_lines(("sum of dy", "sum of dy * n"), values) for values in local]
    means = _lines(("mean(dy)", "mean(dy * n)"), whole)
    title = "Two numbers from each rank are enough for the gradient of every sample"
    return _one_result(title, columns, kept, sums, f"both sums, divided\nby {sum(counts)} samples:\n{means}")


def _lines(names: Sequence[str], values: Sequence[float]) -> str:
    return "\n".join(f"{name}: {number(float(value))}" for name, value in zip(names, values, strict=True))


def _one_result(title: str, columns: Sequence[str], kept: Sequence[str], sent: Sequence[str], result: str) -> Figure:
    """A row for each rank: what it has, and what it sends; on the right what all make of it, and for what."""
    step, top = 0.8, 0.44
    height = top + step * len(kept) + 0.1
    figure, ax = canvas(height)
    for x, heading in zip((2.3, 4.93), columns, strict=True):
        label(ax, x, height - 0.24, heading, size=LABEL, bold=True)
    middle = (height - top) / 2
    for rank, (own, numbers) in enumerate(zip(kept, sent, strict=True)):
        y, colour = height - top - step * (rank + 0.5), rank_colour(rank)
        box(ax, 0.1, y - 0.32, 1.2, 0.64, f"rank {rank}\n{own}", colour=colour, size=SMALL)
        box(ax, 1.4, y - 0.32, 1.8, 0.64, numbers, colour=colour, size=SMALL)
        arrow(ax, (3.23, y), (4.0, middle), colour=colour)
    box(ax, 4.03, middle - 0.48, 1.8, 0.96, result, colour=SHARED, size=SMALL, bold=True)
    arrow(ax, (5.86, middle), (6.57, middle), colour=SHARED)
    box(ax, 6.6, middle - 0.32, 1.3, 0.64, "each rank: dx of\nits own samples", colour=SHARED, size=SMALL)
    finding(ax, title)
    return figure
