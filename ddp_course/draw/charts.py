"""What do all plotted numbers have in common: the page, the grid, the names of the axes, the legend?"""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddp_course.draw.style import DPI, FAINT, HEADING, INK, LABEL, LINE, MUTED, PAPER, SMALL, WIDTH


def page(height: float) -> Figure:
    """An empty page, `height` inches high, that makes room for the texts around its axes."""
    return plt.figure(figsize=(WIDTH, height), dpi=DPI, facecolor=PAPER, layout="constrained")


def chart(height: float) -> tuple[Figure, Axes]:
    """A page with plain axes for plotted numbers."""
    figure = page(height)
    ax = figure.add_subplot()
    plain_axes(ax)
    return figure, ax


def plain_axes(ax: Axes) -> None:
    """Give axes the course's look: light grid, muted ticks, two of the four frame lines."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(LINE)
    ax.tick_params(colors=MUTED, labelsize=SMALL)
    ax.grid(color=FAINT, alpha=0.6, linewidth=0.8)
    ax.set_axisbelow(True)


def name_axes(ax: Axes, across: str = "", up: str = "") -> None:
    """Write what the axes count; an axis with an empty text is left as it is."""
    if across:
        ax.set_xlabel(across, color=MUTED, fontsize=LABEL)
    if up:
        ax.set_ylabel(up, color=MUTED, fontsize=LABEL)


def headline(ax: Axes, text: str) -> None:
    """Write above plotted numbers what they show, in one line."""
    ax.set_title(text, loc="left", fontsize=HEADING, color=INK, weight="bold")


def note(ax: Axes, x: float, y: float, text: str) -> None:
    """Write right of a plotted point."""
    ax.annotate(text, (x, y), (6, 0), textcoords="offset points", va="center", color=INK, fontsize=LABEL)


def legend(where: Axes | Figure, size: float = SMALL, **look: object) -> None:
    """The legend of some axes, or of the page, in small letters and without a frame."""
    where.legend(frameon=False, fontsize=size, **look)


def legend_beside(ax: Axes, **look: object) -> None:
    """The legend to the right of the axes, where no curve can run into it."""
    legend(ax, loc="center left", bbox_to_anchor=(1.0, 0.5), **look)
