"""How does every picture of the course come to look the same?

One canvas, one palette, one set of font sizes, and three shapes: a box, an arrow, a label. The unit of every
drawing is the inch, so a number in the code is a length on the page. `text_problems` looks at a finished
figure and names texts that collide, stick out of their box or leave the page; the tests call it on every one.

Left out on purpose: anything about training. The pictures themselves are in the files beside this one.
Read next: `ranks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.text import Text
from matplotlib.transforms import Bbox

DPI = 100
WIDTH = 8.0  # inches: 800 pixels, the width of a notebook's output on a small laptop

HEADING = 11
LABEL = 10
SMALL = 9
MONO = "DejaVu Sans Mono"

INK = "#222222"
MUTED = "#5f6368"
LINE = "#8a8f98"
FAINT = "#d0d3d8"
PAPER = "#ffffff"
SHARED = "#444444"  # what belongs to all ranks: the kernel, a store, a mean
ALARM = "#b00020"

# Six of Okabe and Ito's colours, which stay apart for colour-blind readers, and two darker ones. A picture
# never relies on the colour alone: the rank's number stands beside it.
RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8F8B00", "#7A4E2D")


def rank_colour(rank: int) -> str:
    """The colour of a rank, the same in every picture; repeats after eight ranks."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def tint(colour: str, strength: float = 0.16) -> tuple[float, float, float]:
    """The colour mixed with white: `strength` 0 is white, 1 is the colour itself."""
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(colour))
    return red, green, blue


def canvas(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """An empty page, `width` by `height` inches, with one unit per inch and no axes shown."""
    figure = plt.figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")
    return figure, ax


def chart(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """A page with plain axes for plotted numbers: light grid, no frame at the top and on the right."""
    figure = plt.figure(figsize=(width, height), dpi=DPI, facecolor=PAPER, layout="constrained")
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
    size: float = LABEL,
    mono: bool = False,
    bold: bool = False,
    ink: str = INK,
) -> FancyBboxPatch:
    """A rounded box with its lower left corner at (x, y) and `text` in its middle."""
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
        label(ax, x + width / 2, y + height / 2, text, size=size, mono=mono, bold=bold, ink=ink)
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


def texts_of(figure: Figure) -> list[str]:
    """Every text that the picture wrote, in drawing order; not the numbers along a chart's axes."""
    return [text.get_text() for text in _written(figure)]


def text_problems(figure: Figure) -> list[str]:
    """Sentences about texts that collide, stick out of their box, or leave the page; empty is good."""
    figure.canvas.draw()
    texts = [(text.get_text(), text.get_window_extent()) for text in _written(figure)]
    shapes = [shape for ax in figure.axes for shape in ax.patches if isinstance(shape, FancyBboxPatch)]
    frames = [shape.get_window_extent() for shape in shapes]
    pairs = combinations(texts, 2)
    problems = [f"{one!r} collides with {two!r}" for (one, a), (two, b) in pairs if a.overlaps(b)]
    for text, extent in texts:
        if not _inside(extent, figure.bbox):
            problems.append(f"{text!r} leaves the page")
        middle = ((extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2)
        if any(frame.contains(*middle) and not _inside(extent, frame) for frame in frames):
            problems.append(f"{text!r} sticks out of its box")
    return problems


def _inside(inner: Bbox, outer: Bbox) -> bool:
    across = outer.x0 <= inner.x0 and inner.x1 <= outer.x1
    return across and outer.y0 <= inner.y0 and inner.y1 <= outer.y1


def _written(figure: Figure) -> Iterator[Text]:
    for ax in figure.axes:
        legend = ax.get_legend()
        own = [ax.title, ax.xaxis.label, ax.yaxis.label] if ax.axison else []
        for text in [*own, *ax.texts, *(legend.get_texts() if legend else [])]:
            if text.get_text().strip():
                yield text
