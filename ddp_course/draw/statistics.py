"""How do the ranks' rows become one mean and one variance, and how noisy are those of a small batch?

Read next: `metrics.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from ddp_course.draw.charts import chart, legend, name_axes
from ddp_course.draw.shapes import arrow, box, canvas, label, number
from ddp_course.draw.style import HEADING, INK, LABEL, RANK_COLOURS, SHARED, SMALL, WIDTH, rank_colour

STYLES = ("o-", "s--", "^:", "D-.")


def combined_statistics(
    rows: Sequence[Sequence[float]], local: Sequence[Sequence[float]], whole: Sequence[float]
) -> Figure:
    """Each rank's rows of one channel, its mean, squares and count, and what all ranks make of them.

    Args:
        rows: the values of each rank; the first four are shown.
        local: mean, sum of squared differences from it, and count, of each rank.
        whole: mean, variance and count of all rows, as combined.
    """
    step, top = 0.92, 0.5
    height = top + step * len(rows) + 0.1
    figure, ax = canvas(height)
    columns = ((1.6, "rows of one channel"), (4.45, "what each rank sends"), (7.0, "all ranks compute"))
    for x, title in columns:
        label(ax, x, height - 0.26, title, size=LABEL, bold=True)
    middle = (height - top) / 2
    for rank, (values, statistics) in enumerate(zip(rows, local, strict=True)):
        y, colour = height - top - step * (rank + 0.5), rank_colour(rank)
        shown = "  ".join(number(float(value)) for value in values[:4]) + ("  ..." if len(values) > 4 else "")
        box(ax, 0.1, y - 0.36, 3.0, 0.72, f"rank {rank}\n{shown or 'no rows'}", colour=colour, size=SMALL)
        mean, squares, count = (number(float(value)) for value in statistics)
        text = f"mean {mean}\nsquares {squares}\ncount {count}"
        box(ax, 3.55, y - 0.36, 1.8, 0.72, text, colour=colour, size=SMALL)
        arrow(ax, (3.13, y), (3.52, y), colour=colour)
        arrow(ax, (5.38, y), (6.07, middle), colour=colour)
    mean, variance, count = (number(float(value)) for value in whole)
    text = f"mean {mean}\nvariance {variance}\ncount {count}"
    box(ax, 6.1, middle - 0.45, WIDTH - 6.2, 0.9, text, colour=SHARED, size=SMALL, bold=True)
    return figure


def statistics_noise(sizes: Sequence[int], spread: Mapping[str, Sequence[float]], ylabel: str) -> Figure:
    """How far local statistics lie from those of the whole, by name, for local batches of several sizes in rows."""
    figure, ax = chart(3.1)
    for place, (name, values) in enumerate(spread.items()):
        ax.plot(sizes, values, STYLES[place % len(STYLES)], color=RANK_COLOURS[place], linewidth=2, label=name)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.minorticks_off()
    ax.set_ylim(0, None)
    ax.set_title("local statistics", color=INK, fontsize=HEADING)
    name_axes(ax, "rows in the local batch", ylabel)
    legend(ax)
    return figure
