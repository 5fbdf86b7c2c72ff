"""What keeps replicas equal, and how do they part when it does not hold?

Read next: `buckets.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddp_course.draw.charts import legend, name_axes, page, plain_axes
from ddp_course.draw.shapes import arrow, box, canvas, finding, label
from ddp_course.draw.style import ALARM, HEADING, INK, MUTED, RANK_COLOURS, SMALL, WIDTH, rank_colour

CONDITIONS = ("same start", "same gradient", "same step", "same replicas")
MOMENTS = ("before training", "in the worst step", "in the worst step", "after training")
STYLES = ("-", "--", "-.", ":")


def three_conditions(world_size: int = 2) -> Figure:
    """A step on some ranks: if start, gradient and step are equal, so are the replicas after it."""
    figure, ax = canvas(0.35 + 0.85 * world_size)
    columns = zip(CONDITIONS, ("weight", "gradient", "step", "new weight"), strict=True)
    for place, (name, what) in enumerate(columns):
        x = 0.95 + 1.8 * place
        heading = f"so: {name}" if place == 3 else f"{place + 1}. {name}"
        label(ax, x + 0.65, 0.12 + 0.85 * world_size, heading, bold=True, ink=rank_colour(2) if place == 3 else INK)
        for rank in range(world_size):
            y = 0.2 + 0.85 * (world_size - 1 - rank)
            box(ax, x, y, 1.3, 0.42, what, colour=rank_colour(rank))
            if rank:
                label(ax, x + 0.65, y + 0.64, "=", bold=True, size=HEADING)
            if place == 0:
                label(ax, 0.1, y + 0.21, f"rank {rank}", align="left", bold=True)
            else:
                arrow(ax, (x - 0.47, y + 0.21), (x - 0.03, y + 0.21))
    return figure


def conditions(runs: Mapping[str, Sequence[float]], columns: Sequence[str] = CONDITIONS) -> Figure:
    """One row a run, one column a condition: the largest difference between ranks there, or "equal" if it is 0.

    The last column is the outcome of the others. Below each name stands at which of MOMENTS the ranks were compared.
    """
    row, top = 0.62, 0.62
    height = top + row * len(runs) + 0.1
    figure, ax = canvas(height)
    left = 2.3
    column = (WIDTH - left) / len(columns)
    for place, (name, moment) in enumerate(zip(columns, MOMENTS, strict=False)):
        x = left + column * (place + 0.5) - 0.06
        label(ax, x, height - 0.26, name, bold=True)
        label(ax, x, height - 0.49, moment, size=SMALL, ink=MUTED)
    for number, (run, differences) in enumerate(runs.items()):
        y = height - top - row * (number + 1)
        label(ax, 0.12, y + row / 2, run, align="left", bold=True)
        for place, difference in enumerate(differences):
            equal = difference == 0
            text = "equal" if equal else f"{difference:.2g} apart"
            colour = rank_colour(2) if equal else ALARM
            x = left + column * place
            box(ax, x, y + 0.08, column - 0.12, row - 0.16, text, colour=colour, ink=INK if equal else ALARM)
    ax.plot([left + column * (len(columns) - 1) - 0.06] * 2, [0.08, height - 0.12], color=MUTED, linewidth=1.2)
    finding(ax, "The first red box of a row is the condition that broke")
    return figure


def drift(apart: Mapping[str, Sequence[float]], off: Mapping[str, Sequence[float]]) -> Figure:
    """How far the replicas are from each other, and from one process on the whole batch, after every step.

    The axes are logarithmic, and their lowest line is an exact 0.

    Args:
        apart, off: by run, the largest difference of two ranks, and of rank 0 and the one process, after each step.
    """
    figure = page(3.9)
    left, right = figure.subplots(1, 2, sharey=True)
    positive = [value for curves in (apart, off) for curve in curves.values() for value in curve if value > 0]
    floor = min(positive, default=1.0) / 100
    for ax, curves, title in ((left, apart, "from each other"), (right, off, "from one process")):
        for number, (run, curve) in enumerate(curves.items()):
            colour, style = RANK_COLOURS[number % len(RANK_COLOURS)], STYLES[number % len(STYLES)]
            ax.plot(range(1, len(curve) + 1), curve, color=colour, linestyle=style, linewidth=2.0, label=run)
        _difference_axes(ax, title, floor)
    name_axes(left, up="largest difference of a weight")
    handles, _ = left.get_legend_handles_labels()
    legend(figure, handles=handles, loc="outside lower center", ncols=3)
    return figure


def _difference_axes(ax: Axes, title: str, floor: float) -> None:
    ax.set_yscale("symlog", linthresh=floor)  # logarithmic, but it has a 0
    ax.set_ylim(-floor, None)
    ticks = [exponent for exponent in range(-16, 3, 4) if 10.0**exponent > floor]
    ax.set_yticks([0, *(10.0**exponent for exponent in ticks)], ["0", *(f"1e{exponent}" for exponent in ticks)])
    ax.minorticks_off()
    ax.set_title(title, color=INK, fontsize=HEADING)
    name_axes(ax, "step")
    ax.xaxis.get_major_locator().set_params(integer=True)
    plain_axes(ax)
