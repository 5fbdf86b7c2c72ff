"""How do many ranks' losses become one number, and how far from it is a single rank's?

Read next: `timelines.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddp_course.draw.charts import chart, legend, name_axes, page, plain_axes
from ddp_course.draw.shapes import arrow, box, canvas, finding, label
from ddp_course.draw.style import ALARM, HEADING, INK, MUTED, SMALL, WIDTH, rank_colour, tint


def mean_weights(means: Sequence[float], rows: Sequence[int]) -> Figure:
    """The same parts twice: as wide as their rows, and all equally wide, which is what a mean of means does.

    The height of a part is its mean, so in the left panel its area is its sum.
    """
    figure = page(3.2)
    left, right = figure.subplots(1, 2, sharey=True)
    mean = sum(m * n for m, n in zip(means, rows, strict=True)) / sum(rows)
    mean_of_means = sum(means) / len(means)
    _bars(left, means, rows, f"by samples: {mean:.4f}", INK, mean)
    _bars(right, means, [1] * len(means), f"mean of means: {mean_of_means:.4f}", ALARM, mean_of_means)
    name_axes(left, f"{sum(rows)} samples (width of a batch: its samples)", "mean loss of a batch")
    name_axes(right, "batch (all equally wide)")
    names = [str(number) for number in range(1, len(rows) + 1)]
    names[-1] += f"\n{rows[-1]} sample{'s' * (rows[-1] > 1)}"
    right.set_xticks([place + 0.5 for place in range(len(rows))], names)
    return figure


def _bars(ax: Axes, heights: Sequence[float], widths: Sequence[float], title: str, ink: str, level: float) -> None:
    starts = [sum(widths[:i]) for i in range(len(widths))]
    colour = rank_colour(0)
    ax.bar(starts, heights, widths, align="edge", color=tint(colour, 0.3), edgecolor=colour, linewidth=0.9)
    ax.axhline(level, color=ink, linewidth=2.2, linestyle="--")
    ax.set_title(title, color=ink, fontsize=HEADING)
    plain_axes(ax)


def sums_and_counts(sums: Sequence[float], counts: Sequence[int], mean: float) -> Figure:
    """Each rank's sum and count, added up by one collective, and divided once at the end.

    Args:
        sums, counts: each rank's sum of losses, and its rows.
        mean: what the ranks received, to be compared with the quotient that the picture works out.
    """
    figure, ax = canvas(4.0)
    left = 1.5
    column = (WIDTH - left) / len(sums)
    for y, name in ((3.05, "sum of losses"), (2.57, "samples"), (0.98, "sums and\nsamples of all")):
        label(ax, 0.12, y, name, align="left", bold=True)
    for rank, (total, count) in enumerate(zip(sums, counts, strict=True)):
        x, colour = left + column * rank, rank_colour(rank)
        middle, width = x + (column - 0.15) / 2, column - 0.15
        label(ax, middle, 3.72, f"rank {rank}", bold=True)
        own = f"own mean {total / count:.4f}" if count else "no mean"
        label(ax, middle, 3.47, own if len(sums) <= 4 else own.replace("own mean ", ""), size=SMALL - 1, ink=MUTED)
        box(ax, x, 2.85, width, 0.42, f"{total:.6g}", colour=colour)
        box(ax, x, 2.37, width, 0.42, str(count), colour=colour)  # close to the sum: one message
        arrow(ax, (middle, 2.35), (middle, 1.78), colour=colour)
    wide = column * len(sums) - 0.15
    box(ax, left, 1.46, wide, 0.3, "all_reduce: add up the sums, add up the counts", size=SMALL)
    arrow(ax, (left + wide / 2, 1.44), (left + wide / 2, 1.22))
    all_sums, all_counts = sum(sums), sum(counts)
    box(ax, left, 0.76, wide, 0.44, f"{all_sums:.6g}      {all_counts} samples")
    arrow(ax, (left + wide / 2, 0.74), (left + wide / 2, 0.54))
    agrees = abs(all_sums / all_counts - mean) <= 1e-9 * abs(mean)
    tail = "on every rank" if agrees else f"but the ranks received {mean:.6g}"
    text = f"{all_sums:.6g} / {all_counts} = {all_sums / all_counts:.6g}, {tail}"
    box(ax, left, 0.1, wide, 0.42, text, bold=agrees, ink=INK if agrees else ALARM)
    finding(ax, "Sums and counts are added up; one division, at the end")
    return figure


def own_losses(by_rank: Sequence[Sequence[float]], mean: Sequence[float]) -> Figure:
    """How far each rank's own loss is from the loss over all ranks, in percent of the latter.

    Args:
        by_rank, mean: own losses and the loss over all ranks, at each step.
    """
    figure, ax = chart(3.2)
    points = range(1, len(mean) + 1)
    for rank, mine in enumerate(by_rank):
        apart = [100 * (own - all_) / all_ for own, all_ in zip(mine, mean, strict=True)]
        wide = 2.2 if rank == 0 else 1.1  # rank 0 is the one whose loss is usually shown
        ax.plot(points, apart, color=rank_colour(rank), linewidth=wide, label=f"rank {rank}", zorder=3 - 0.1 * rank)
    ax.axhline(0, color=INK, linewidth=2.0, label="all ranks", zorder=2)
    name_axes(ax, "step", "difference from all ranks' loss (%)")
    ax.xaxis.get_major_locator().set_params(integer=True)
    legend(ax, loc="upper left")
    return figure
