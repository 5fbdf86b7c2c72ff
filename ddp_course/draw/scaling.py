"""What did more ranks bring, what is a step made of, and what does a message cost?

Read next: `levers.py`.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from ddp_course.draw.charts import legend, legend_beside, name_axes, page, plain_axes
from ddp_course.draw.style import ALARM, INK, LABEL, LINE, SMALL, rank_colour, tint
from ddp_course.scaling.collective_cost import CollectiveCost
from ddp_course.scaling.efficiency import PARTS, Scaling

# One colour for each part of a step; exposed communication in the colour of what is to be got rid of.
PART_COLOURS = dict(zip(PARTS, ("#8f8b00", "#56b4e9", "#0072b2", ALARM, "#009e73"), strict=True))


def step_split(scaling: Scaling) -> Figure:
    """The parts of a step as stacked bars, one bar for each number of ranks; a bar's height is the step."""
    figure = page(3.3)
    _split(figure, scaling)
    return figure


def collective_fit(cost: CollectiveCost) -> Figure:
    """Measured times of a collective over its sizes with the fitted line, and below what the line leaves over."""
    figure = page(4.2)
    _fit(figure, cost)
    return figure


def _split(page: Figure | SubFigure, scaling: Scaling) -> None:
    ax = page.subplots()
    places = range(len(scaling.world_sizes))
    below = [0.0] * len(places)
    splits = [scaling.split(size) for size in scaling.world_sizes]
    for part in PARTS:
        heights = [1e3 * split[part] for split in splits]
        # Hatched too: the picture must not depend on the colour alone.
        hatch = "///" if PART_COLOURS[part] == ALARM else None
        fill, edge = tint(PART_COLOURS[part], 0.55), PART_COLOURS[part]
        ax.bar(places, heights, 0.5, below, color=fill, edgecolor=edge, hatch=hatch, label=part)
        below = [b + h for b, h in zip(below, heights, strict=True)]
    for place, total in zip(places, below, strict=True):
        ax.text(place, total, f"{total:.1f} ms", ha="center", va="bottom", fontsize=SMALL, color=INK)
    _frame(ax, "ranks", "one step (ms)", list(places), [str(size) for size in scaling.world_sizes])
    ax.set_ylim(0, 1.12 * max(below))
    ax.set_xlim(-0.5, len(places) - 0.5)
    handles, names = ax.get_legend_handles_labels()  # in the order in which they lie on each other
    legend_beside(ax, handles=handles[::-1], labels=names[::-1])
    ax.set_title(_titled(scaling), color=INK, fontsize=LABEL)


def _fit(page: Figure | SubFigure, cost: CollectiveCost) -> None:
    top, bottom = page.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    smallest, largest = cost.sizes[0], cost.sizes[-1]
    along = [smallest * (largest / smallest) ** (i / 60) for i in range(61)]
    top.plot(
        along, [1e6 * cost.predicted_s(size) for size in along], color=INK, linewidth=1.4, label="alpha + beta x bytes"
    )
    top.plot(cost.sizes, [1e6 * t for t in cost.seconds], "o", color=rank_colour(0), markersize=5, label="measured")
    if smallest < cost.half_bytes < largest:
        half = f"half is latency: {cost.half_bytes / 1024:,.0f} KiB"
        top.axvline(cost.half_bytes, color=LINE, linestyle=":", label=half)
    top.set(xscale="log", yscale="log")
    plain_axes(top)
    name_axes(top, up="microseconds (log)")
    legend(top, loc="upper left")
    line = f"the line says {1e6 * cost.alpha_s:.0f} µs and {cost.peak_bus_bytes_per_s / 1e9:.2f} GB/s"
    most = f"at most {max(cost.bus_bytes_per_s) / 1e9:.2f} GB/s was measured"
    top.set_title(f"{cost.op}, {cost.world_size} ranks: {line}, {most}", color=INK, fontsize=LABEL)
    bottom.axhline(0, color=INK, linewidth=1.4)
    above = [100 * left for left in cost.residuals]
    bottom.vlines(cost.sizes, 0, above, color=rank_colour(0), linewidth=1.4)
    bottom.plot(cost.sizes, above, "o", color=rank_colour(0), markersize=5)
    plain_axes(bottom)
    name_axes(bottom, "bytes (log)", "above fit (%)")


def _titled(scaling: Scaling) -> str:
    first, _, rest = scaling.title.partition(", ")
    return f"{first}\n{rest}" if rest else first


def _frame(ax: Axes, across: str, up: str, ticks: list[int], names: list[str] | None = None) -> None:
    plain_axes(ax)
    ax.set_xticks(ticks, names or [str(tick) for tick in ticks])
    name_axes(ax, across, up)
