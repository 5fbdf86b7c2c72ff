"""What do pictures of spans on one clock share: the page, the bars, the names beside the rows, the legend?

Read next: `timelines.py`, what a step did; `levers.py`, what it would do.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, Rectangle

from ddp_course.draw.charts import chart, legend
from ddp_course.draw.shapes import label
from ddp_course.draw.style import MUTED, SMALL, WIDTH, rank_colour, tint
from ddp_course.scaling.spans import Span

STRENGTH = {"forward": 0.3, "backward": 0.85, "optimizer": 0.55}
BELOW = 0.8  # inches, for the axis' name and the legend


def clock(inches: float, left: float, above: float) -> tuple[Figure, Axes]:
    """Axes `inches` high that count milliseconds, with fixed margins: left for names, above for the title."""
    height = inches + BELOW + above
    figure, ax = chart(height)
    figure.set_layout_engine("none")
    ax.set_position((left / WIDTH, BELOW / height, 1 - (left + 0.15) / WIDTH, inches / height))
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("ms", color=MUTED, fontsize=SMALL)
    return figure, ax


def bar(ax: Axes, span: Span, row: float, height: float, **look: object) -> None:
    """A span in the middle of its row, which is 1 high."""
    start, width = span.start_s * 1000, (span.end_s - span.start_s) * 1000
    ax.add_patch(Rectangle((start, row + (1 - height) / 2), width, height, zorder=3, **look))


def beside(ax: Axes, y: float, text: str, bold: bool = False) -> None:
    """Write at the left of a row, outside the axes."""
    label(ax, -0.01, y, text, size=SMALL, bold=bold, align="right").set_transform(ax.get_yaxis_transform())


def shade(lane: str, rank: int = 0) -> Patch:
    """What a shade of the model's work means, in a rank's colour."""
    return Patch(facecolor=tint(rank_colour(rank), STRENGTH[lane]), label=lane)


def legend_below(ax: Axes, handles: Sequence[Artist | tuple[Artist, ...]], centre: float, inches: float) -> None:
    """One line below the axis' own name; a tuple is one entry. `inches` is the height of the axes."""
    labels = [(each[0] if isinstance(each, tuple) else each).get_label() for each in handles]
    look = {"handlelength": 1.4, "columnspacing": 1.2, "ncols": max(1, len(handles)), "labels": labels}
    look["handler_map"] = {tuple: HandlerTuple(ndivide=None, pad=0)}
    legend(ax, size=SMALL - 1, handles=handles, loc="upper center", bbox_to_anchor=(centre, -0.42 / inches), **look)
