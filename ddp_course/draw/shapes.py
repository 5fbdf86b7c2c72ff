"""What are the drawings made of? A page that counts in inches, and on it boxes, labels and arrows.

Read next: `ranks.py`.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.text import Text

from ddp_course.draw.style import DPI, HEADING, INK, LABEL, LINE, MONO, PAPER, SHARED, WIDTH, tint

TITLE_ROOM = 0.36  # inches that a title adds above a drawing


def canvas(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """An empty page, `width` by `height` inches, with one unit per inch and no axes shown."""
    figure = plt.figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")
    return figure, ax


def finding(ax: Axes, text: str) -> None:
    """Write above a drawing what it shows, in one line; the page grows by that line, and the drawing stays as it is."""
    figure = ax.figure
    height = figure.get_figheight()
    figure.set_figheight(height + TITLE_ROOM)
    ax.set_position((0, 0, 1, height / (height + TITLE_ROOM)))
    ax.set_title(text, loc="left", x=0.012, pad=7, fontsize=HEADING, color=INK, weight="bold")


def box(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str = "",
    *,
    colour: str = SHARED,
    fill: bool = True,
    dashed: bool = False,
    **letters: Any,
) -> FancyBboxPatch:
    """A rounded box with its lower left corner at (x, y) and `text` in its middle; `letters` as of `label`."""
    shape = FancyBboxPatch(
        (x, y),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.07",
        edgecolor=colour,
        linewidth=1.4,
        facecolor=tint(colour) if fill else PAPER,
        linestyle="--" if dashed else "-",
    )
    ax.add_patch(shape)
    if text:
        label(ax, x + width / 2, y + height / 2, text, **letters)
    return shape


def label(
    ax: Axes,
    x: float,
    y: float,
    text: str,
    *,
    size: float = LABEL,
    mono: bool = False,
    bold: bool = False,
    ink: str = INK,
    align: str = "center",
) -> Text:
    """A text whose middle (or left or right end, by `align`) is at (x, y)."""
    return ax.text(
        x,
        y,
        text,
        fontsize=size,
        color=ink,
        ha=align,
        va="center",
        family=MONO if mono else "DejaVu Sans",
        weight="bold" if bold else "normal",
        linespacing=1.35,
        zorder=5,
    )


def arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    *,
    colour: str = LINE,
    both_ways: bool = False,
    dashed: bool = False,
) -> FancyArrowPatch:
    """A straight arrow from `start` to `end`."""
    shape = FancyArrowPatch(
        start,
        end,
        arrowstyle="<|-|>" if both_ways else "-|>",
        mutation_scale=11,
        color=colour,
        linewidth=1.4,
        linestyle="--" if dashed else "-",
        shrinkA=0,
        shrinkB=0,
    )
    ax.add_patch(shape)
    return shape


def number(value: object) -> str:
    """A value as the pictures write it: floats with at most three decimals, the rest as Python shows it."""
    if isinstance(value, float):
        shown = f"{value:.3f}".rstrip("0").rstrip(".")
        return "0" if shown == "-0" else shown
    return str(value)
