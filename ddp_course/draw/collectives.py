"""What does a collective move, which chunk is where in a ring, and who sends to whom in a tree?

Colours come from the data: a value has the colour of the one rank that brought it, and is grey when it is new.

Left out on purpose: buckets and overlap, which are in `timelines.py`.
Read next: `data_parallel.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddp_course.draw.shapes import arrow, box, canvas, finding, label, number
from ddp_course.draw.style import DPI, FAINT, INK, LINE, MUTED, PAPER, SHARED, SMALL, WIDTH, rank_colour, tint

Values = Sequence[object] | None  # what one rank holds; None: nothing
MOST_RING_RANKS = 4
ROW = 0.36  # inches for what one rank holds
WHO_GETS_WHAT = {
    "broadcast": "all get the source's tensor",
    "scatter": "each gets its part",
    "gather": "one gets all parts",
    "reduce": "one gets the sum; do not read the others",
    "all_reduce": "all get the sum",
    "reduce_scatter": "each gets its part of the sum",
    "all_gather": "all get all parts",
    "all_to_all": "rows become columns",
    "barrier": "all leave when the last has arrived",
}


def collective(
    before: Sequence[Values], after: Sequence[Values], name: str, sides: tuple[str, str] = ("before", "after")
) -> Figure:
    """One collective: what each rank held before, and what it holds afterwards.

    Args:
        before, after: by rank, its values, or None for a rank that brings or receives nothing.
        sides: what stands above the two.
    """
    world_size = len(before)
    height = ROW * world_size + 0.5
    figure, ax = canvas(height)
    origin = _origins(before)
    slots = max(len(values) for values in [*before, *after] if values is not None)
    cell = _whole_pixels(min(0.72, 2.75 / slots))
    for title, left, side in zip(sides, (0.95, 5.15), (before, after), strict=True):
        label(ax, left, height - 0.2, title, ink=MUTED, align="left")
        for rank, values in enumerate(side):
            _row_of_cells(ax, values, left, height - 0.42 - ROW * (rank + 0.5), cell, origin)
    for rank in range(world_size):
        label(ax, 0.12, height - 0.42 - ROW * (rank + 0.5), f"rank {rank}", bold=True, align="left")
    middle = height - 0.42 - ROW * world_size / 2
    arrow(ax, (3.95, middle - 0.12), (4.95, middle - 0.12), colour=SHARED)
    label(ax, 4.45, middle + 0.1, name, bold=True, size=SMALL)
    if name in WHO_GETS_WHAT:
        finding(ax, f"{name}: {WHO_GETS_WHAT[name]}")
    ax.says = f"{name}. {sides[0].capitalize()}: {_held(before)}. {sides[1].capitalize()}: {_held(after)}."
    return figure


def _held(side: Sequence[Values]) -> str:
    held = (", ".join(map(number, values)) if values is not None else "nothing" for values in side)
    return "; ".join(f"rank {rank} has {values}" for rank, values in enumerate(held))


def _whole_pixels(inches: float) -> float:
    """Round down, so that equal boxes look equal, and compress well."""
    return int(inches * DPI) / DPI


def _origins(before: Sequence[Values]) -> dict[object, int | None]:
    """The rank that brought a value, for each value; None where two ranks brought the same."""
    origin: dict[object, int | None] = {}
    for rank, values in enumerate(before):
        for value in values or ():
            origin[value] = rank if origin.get(value, rank) == rank else None
    return origin


def _row_of_cells(
    ax: Axes, values: Values, left: float, middle: float, cell: float, origin: Mapping[object, int | None]
) -> None:
    if values is None:
        label(ax, left + 0.05, middle, "nothing", size=SMALL, ink=MUTED, align="left")
        return
    for slot, value in enumerate(values):
        source = origin.get(value)
        colour = SHARED if source is None else rank_colour(source)
        spot = (left + cell * slot, middle - ROW / 2 + 0.03, cell - 0.06, ROW - 0.06)
        box(ax, *spot, number(value), colour=colour, size=SMALL)


def ring_steps(snapshots: Sequence[Sequence[Sequence[object]]]) -> Figure:
    """The chunks of every rank after each step of a ring all-reduce, from the start to the end.

    Args:
        snapshots: by step, by rank, by chunk: the value that the rank held in that chunk. There are 2(W-1) + 1 of
            them, the first from before the first step.
    Raises:
        ValueError: another number of snapshots, or too many ranks for one page.
    """
    world_size = len(snapshots[0])
    if not 2 <= world_size <= MOST_RING_RANKS:
        raise ValueError(f"{world_size} ranks: the picture has room for 2 to {MOST_RING_RANKS}")
    if len(snapshots) != 2 * world_size - 1:
        raise ValueError(f"{world_size} ranks take 2(W-1) = {2 * world_size - 2} steps; found {len(snapshots) - 1}")
    row, tall = 0.3, 0.3 * world_size + 0.65
    figure, ax = canvas(2 * tall + 0.1)
    cell = _whole_pixels(((WIDTH - 0.75) / world_size - 0.18) / world_size)
    pitch = cell * world_size + 0.18
    for step, held in enumerate(snapshots):
        line, column = divmod(step, world_size)
        top = 2 * tall + 0.05 - line * tall
        left = 0.7 + pitch * column
        label(ax, left + (pitch - 0.18) / 2, top - 0.2, _step_title(step, world_size), size=SMALL, ink=MUTED)
        if column == 0:
            label(ax, 0.12, top - 0.44, "chunk", size=SMALL - 1, ink=MUTED, align="left")
            for chunk in range(world_size):
                label(ax, left + cell * (chunk + 0.5), top - 0.44, str(chunk), size=SMALL - 1, ink=MUTED)
        for rank in range(world_size):
            y = top - 0.55 - row * (rank + 1)
            if column == 0:
                label(ax, 0.12, y + row / 2, f"rank {rank}", bold=True, size=SMALL, align="left")
            for chunk, value in enumerate(held[rank]):
                arrived = step > 0 and value != snapshots[step - 1][rank][chunk]
                started = value == snapshots[0][rank][chunk]
                complete = value == snapshots[-1][rank][chunk]
                spot = (left + cell * chunk, y, cell, row)
                _chunk(ax, spot, value, rank, (rank - 1) % world_size if arrived else None, started, complete)
    left = 0.7 + pitch * (world_size - 1)
    notes = "thick edge, in the\nsender's colour:\njust arrived\n\ndark: the full sum"
    label(ax, left, tall / 2, notes, size=SMALL - 1, ink=MUTED, align="left")
    steps = world_size - 1
    finding(ax, f"{steps} steps add, {steps} copy: then all hold the full sum")
    return figure


def _step_title(step: int, world_size: int) -> str:
    if step == 0:
        return "before"
    return f"step {step}: {'add' if step < world_size else 'copy'}"


def _chunk(
    ax: Axes, spot: Sequence[float], value: object, rank: int, sender: int | None, started: bool, complete: bool
) -> None:
    x, y, width, height = spot
    ink = PAPER if complete else INK
    shape = box(ax, x + 0.02, y + 0.02, width - 0.04, height - 0.04, number(value), size=SMALL - 2, mono=True, ink=ink)
    face = SHARED if complete else tint(rank_colour(rank)) if started else tint(SHARED, 0.22)
    shape.set(facecolor=face, edgecolor=LINE if sender is None else rank_colour(sender))
    shape.set_linewidth(0.6 if sender is None else 2.4)


def message_rounds(
    rounds: Sequence[Sequence[tuple[int, int, int]]], world_size: int, title: str = "", ranks_per_node: int = 0
) -> Figure:
    """Who sent to whom in each round: one upright line per rank, one arrow per message, time runs downwards.

    Args:
        rounds: by round, its messages as (from, to, bytes).
        title: what is to be seen; without it, how many rounds and messages there are.
        ranks_per_node: shades the ranks of each node, if given.
    """
    row, left, right = 0.46, 1.25, 3.1
    height = row * len(rounds) + 0.55
    figure, ax = canvas(height)
    column = (WIDTH - left - right) / max(1, world_size - 1)
    for rank in range(world_size):
        x = left + column * rank
        ax.plot((x, x), (0.12, height - 0.38), color=FAINT, linewidth=2, zorder=0)
        label(ax, x, height - 0.2, f"rank {rank}", bold=True)
    for first in range(0, world_size, ranks_per_node) if ranks_per_node else ():
        start, end = (left + column * rank for rank in (first, first + ranks_per_node - 1))
        ax.axvspan(start - 0.32, end + 0.32, color="0.95", zorder=-1)
        label(ax, (start + end) / 2, height - 0.2, f"node {first // ranks_per_node}")
    for place, messages in enumerate(rounds):
        top = height - 0.45 - row * place
        label(ax, 0.12, top - row / 2, f"round {place + 1}", size=SMALL, ink=MUTED, align="left")
        for source, target, _ in messages:
            start, end = left + column * source, left + column * target
            arrow(ax, (start, top - 0.04), (end, top - row + 0.08), colour=rank_colour(source))
        label(ax, WIDTH - right + 0.45, top - row / 2, _counted(messages), size=SMALL, align="left")
    count = sum(map(len, rounds))
    finding(ax, title or f"{world_size} ranks need {len(rounds)} rounds and {count} message{'s' * (count != 1)}")
    ax.says = " ".join(
        f"Round {place + 1}, {_counted(messages)}: {', '.join(f'{a} to {b}' for a, b, _ in messages)}."
        for place, messages in enumerate(rounds)
    )
    return figure


def _counted(messages: Sequence[tuple[int, int, int]]) -> str:
    sizes = sorted({n_bytes for _, _, n_bytes in messages})
    each = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    return f"{len(messages)} message{'s' if len(messages) > 1 else ''} of {each} B"
