"""How is a text dealt to ranks, and what happens in a step with accumulation?

The windows and the step show an order, so their axes are no clock.

Read next: `overview.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddp_course.draw.shapes import arrow, box, canvas, finding, label
from ddp_course.draw.style import FAINT, INK, MUTED, RANK_COLOURS, SHARED, SMALL, WIDTH, rank_colour

LEFT = 1.35  # inches for the names of the rows
TAIL = 2.9  # inches for what follows the micro-batches


def gpt_block() -> Figure:
    """The residual stream through GPT-2: what a block adds to it, and what comes before and after all blocks."""
    figure, ax = canvas(2.35)
    box(ax, 0.1, 0.3, 1.3, 0.6, "token embedding\n+ position's", size=SMALL)
    box(ax, 6.6, 0.3, 1.3, 0.6, "norm, then\nlogits", size=SMALL)
    box(ax, 1.6, 0.1, 4.8, 2.1, colour=FAINT, fill=False)
    label(ax, 4.0, 2.03, "a block; the next one begins where it ends", size=SMALL, ink=MUTED)
    arrow(ax, (1.4, 0.6), (6.6, 0.6), colour=INK)
    parts = (("norm, attention: queries,\nkeys and values so far", 0), ("norm, MLP:\neach position alone", 4))
    for (text, colour), x in zip(parts, (1.75, 4.1), strict=True):
        box(ax, x, 1.2, 2.1, 0.62, text, colour=RANK_COLOURS[colour], size=SMALL)
        arrow(ax, (x + 0.2, 0.62), (x + 0.2, 1.18), colour=RANK_COLOURS[colour])
        arrow(ax, (x + 1.8, 1.18), (x + 1.8, 0.76), colour=RANK_COLOURS[colour])
        box(ax, x + 1.66, 0.46, 0.28, 0.28, "+", size=SMALL)
    finding(ax, "The residual stream runs through all blocks, and each adds to it twice")
    return figure


def dealt_windows(order: Sequence[int], world_size: int, local_batch: int, position: int) -> Figure:
    """A text cut into windows: above as it stands, below in the epoch's order, each with the rank that reads it.

    Args:
        order: the window at each place of the epoch.
        position: how many of them all ranks together have read.
    """
    length, together = len(order), world_size * local_batch
    step = (WIDTH - LEFT - 0.2) / length
    figure, ax = canvas(2.75)
    owner = {window: place % world_size for place, window in enumerate(order) if place < length // together * together}
    rows = (("the text", "cut in windows", range(length)), ("the epoch", "shuffled", order))
    for row, (name, note, windows) in enumerate(rows):
        y = 1.75 - 1.15 * row
        label(ax, 0.12, y + 0.37, name, align="left", bold=True)
        label(ax, 0.12, y + 0.12, note, align="left", size=SMALL, ink=MUTED)
        for place, window in enumerate(windows):
            colour = rank_colour(owner[window]) if window in owner else FAINT
            look = {"fill": window in order[:position], "ink": INK if window in owner else MUTED, "size": SMALL}
            box(ax, LEFT + step * place, y, step - 0.05, 0.5, f"{window}", colour=colour, **look)
    x = LEFT + step * position - 0.025
    ax.plot([x, x], [0.45, 1.3], color=INK, linewidth=2)
    label(ax, min(x, WIDTH - 0.6), 1.45, f"position {position}", size=SMALL, bold=True)
    for rank in range(world_size):
        box(ax, LEFT + rank, 0.1, 0.2, 0.2, colour=rank_colour(rank))
        label(ax, LEFT + rank + 0.28, 0.2, f"rank {rank}", align="left", size=SMALL)
    key = "filled: read; white: later; grey: left out"
    label(ax, LEFT + world_size + 0.1, 0.2, key, align="left", size=SMALL, ink=MUTED)
    finding(ax, f"{world_size} ranks take turns in one shuffled order, so one position says what has been read")
    return figure


def accumulation_step(world_size: int, accumulation: int) -> Figure:
    """One step in order: micro-batches under `no_sync`, the last one with the average, then clipping and the update."""
    figure, ax = canvas(0.75 * world_size + 1.35)
    unit, height = (WIDTH - LEFT - TAIL - 0.1) / accumulation, 0.75 * world_size
    average = LEFT + unit * accumulation
    clip, update = average + 1.05, average + 1.95
    for rank in range(world_size):
        y, colour = height - 0.75 * rank, rank_colour(rank)
        label(ax, 0.12, y + 0.25, f"rank {rank}", align="left", bold=True)
        for micro in range(accumulation):
            text = f"micro-batch {micro}" if accumulation < 4 else f"{micro}"
            box(ax, LEFT + unit * micro, y, unit - 0.1, 0.5, text, colour=colour, size=SMALL)
        box(ax, clip, y, 0.75, 0.5, "clip", colour=SHARED, size=SMALL)
        box(ax, update, y, 0.85, 0.5, "update", colour=SHARED, size=SMALL)
    box(ax, average, 0.75, 0.9, height - 0.25, "average", colour=RANK_COLOURS[4], size=SMALL)
    if accumulation > 1:
        _line(ax, LEFT, average - unit - 0.1, height + 0.72, MUTED, "no_sync: gradients add up, nothing is sent", 0.2)
    _line(ax, average - unit, average + 0.9, 0.55, RANK_COLOURS[4], "in the last backward pass", -0.2)
    label(ax, (clip + update + 0.85) / 2, 0.35, "the same on every rank", size=SMALL)
    arrow(ax, (LEFT, 0.1), (WIDTH - 0.1, 0.1))
    label(ax, 0.12, 0.1, "time", align="left", size=SMALL, ink=MUTED)
    many = f"{accumulation} micro-batches" if accumulation > 1 else "One micro-batch"
    finding(ax, f"{many} and one average: the ranks communicate once a step, and clip after it")
    return figure


def _line(ax: Axes, start: float, end: float, y: float, colour: str, text: str, above: float) -> None:
    """A line over what belongs together, with its name."""
    ax.plot([start, end], [y, y], color=colour, linewidth=2)
    label(ax, max((start + end) / 2, LEFT + 1.4), y + above, text, size=SMALL)
