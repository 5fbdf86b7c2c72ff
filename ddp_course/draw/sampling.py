"""Which sample goes to which rank, and how does a formula shuffle?

Read next: `parallel/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ddp_course.draw.charts import name_axes, page, plain_axes
from ddp_course.draw.shapes import box, canvas, finding, label
from ddp_course.draw.style import ALARM, HEADING, INK, LABEL, LINE, MUTED, PAPER, SMALL, WIDTH, rank_colour, tint


def dealt(by_rank: Sequence[Sequence[int]], length: int, point: str = "") -> Figure:
    """The samples of every rank, a row of boxes each, a column a step; dashed red where a sample was given out before.

    Samples count as given out in the order of the steps: first every rank's first one, then every rank's second one.

    Args:
        by_rank: the indices that each rank's sampler gave.
        length: samples in the dataset; the heading counts those that no rank got, and lists the first.
        point: what the picture shows, before the count in its heading.
    """
    steps = max(map(len, by_rank), default=0)
    left, row = 0.95, 0.46
    height = row * len(by_rank) + 0.35
    figure, ax = canvas(height)
    column = min(1.1, (WIDTH - left - 0.1) / max(steps, 1))
    label(ax, 0.12, height - 0.12, "step", size=SMALL, ink=MUTED, align="left")
    for step in range(steps):
        label(ax, left + column * (step + 0.5) - 0.035, height - 0.12, str(step), size=SMALL, ink=MUTED)
    repeated = _repeated(by_rank)
    for rank, indices in enumerate(by_rank):
        y = height - 0.25 - row * (rank + 1)
        label(ax, 0.12, y + 0.18, f"rank {rank}", bold=True, align="left")
        for step, index in enumerate(indices):
            again = (rank, step) in repeated
            colour = ALARM if again else rank_colour(rank)
            place = (left + column * step, y, column - 0.07, 0.36)
            box(ax, *place, str(index), colour=colour, fill=not again, dashed=again, ink=colour if again else INK)
    finding(ax, f"{point}: " * bool(point) + _account(by_rank, length, len(repeated)))
    ax.says = " ".join(f"Rank {rank}: {', '.join(map(str, indices))}." for rank, indices in enumerate(by_rank))
    return figure


def _repeated(by_rank: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """Which (rank, step) got a sample that some rank had got before."""
    seen: set[int] = set()
    repeated = set()
    for step in range(max(map(len, by_rank), default=0)):
        for rank, indices in enumerate(by_rank):
            if step < len(indices):
                if indices[step] in seen:
                    repeated.add((rank, step))
                seen.add(indices[step])
    return repeated


def _account(by_rank: Sequence[Sequence[int]], length: int, repeated: int) -> str:
    seen = {index for indices in by_rank for index in indices}
    never = [index for index in range(length) if index not in seen]
    shown = ", ".join(map(str, never if len(never) <= 4 else [*never[:3], "..."]))
    parts = [f"{len(seen)} of {length} samples seen", f"{repeated} repeated (dashed)" if repeated else ""]
    parts.append(f"{len(never)} never seen: {shown}" if never else "")
    return "; ".join(part for part in parts if part)


def orders(samples: Mapping[str, Sequence[int]], title: str = "") -> Figure:
    """One panel per order, by its name: a dot for each position, at the height of the sample that stands there."""
    figure = page(WIDTH / len(samples) + 0.7)
    for ax, (name, found) in zip(figure.subplots(1, len(samples), squeeze=False)[0], samples.items(), strict=True):
        plain_axes(ax)
        ax.scatter(range(len(found)), found, s=max(1.0, 900 / len(found)), color=rank_colour(0), linewidths=0)
        ax.set_title(name, color=INK, fontsize=LABEL)
        name_axes(ax, "position")
        ax.set_box_aspect(1)
    name_axes(figure.axes[0], up="sample")
    _heading(figure, title)
    return figure


def halves(stages: Mapping[str, Sequence[int]], low_bits: int, title: str = "") -> Figure:
    """Numbers on a grid, one panel per stage: the column is the low half of where a number is now, the row the high.

    A round that changes one half moves numbers within their columns or within their rows.

    Args:
        stages: by name, for each starting number 0, 1, 2, ... where it is now.
        low_bits: bits of the low half; the grid has 2**low_bits columns.
    Raises:
        ValueError: two numbers are in the same place, which no picture could show.
    """
    figure = page(WIDTH / len(stages) + 1.05)
    for ax, (name, places) in zip(figure.subplots(1, len(stages), squeeze=False)[0], stages.items(), strict=True):
        if len(set(places)) < len(places):
            raise ValueError(f"{name}: two numbers are in the same place")
        _grid(ax, places, 2**low_bits)
        ax.set_title(name, color=INK, fontsize=LABEL)
    name_axes(figure.axes[0], up="high half")
    _heading(figure, title)
    return figure


def _heading(figure: Figure, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=HEADING, color=INK, weight="bold")


def _grid(ax: Axes, places: Sequence[int], columns: int) -> None:
    rows = -(-len(places) // columns)
    for number, place in enumerate(places):
        high, low = divmod(place, columns)
        shade = tint(rank_colour(number // columns), 0.3)  # the colour of the row it started in
        ax.add_patch(Rectangle((low - 0.5, high - 0.5), 1, 1, facecolor=shade, edgecolor=PAPER, linewidth=2))
        ax.text(low, high, str(number), ha="center", va="center", fontsize=LABEL, color=INK)
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), xticks=range(columns), yticks=range(rows))
    ax.set_aspect("equal")
    name_axes(ax, "low half")
    ax.spines[:].set_visible(False)
    ax.tick_params(colors=LINE, labelsize=SMALL, length=0)
