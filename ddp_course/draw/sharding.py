"""Which rank has which part of a matrix, and when is a layer whole under FSDP?

Left out on purpose: how long a layer computes, and the gathering of the next one meanwhile.
Read next: lessons 17 and 18, notebooks/17_sharding.ipynb and notebooks/18_model_parallel.ipynb.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ddp_course.draw.shapes import arrow, canvas, finding, label
from ddp_course.draw.style import FAINT, LINE, MUTED, PAPER, RANK_COLOURS, SMALL, WIDTH, rank_colour, tint

LEFT, COLUMN, ROW = 0.95, 0.83, 0.36
GAP = 0.55  # inches between two matrices, for the words beside each


def gathered_layers(seen: Sequence[tuple[str, Sequence[bool]]], world_size: int) -> Figure:
    """What rank 0 has of each layer's parameters, moment by moment, and which collective runs before or after.

    Args:
        seen: moments in their order, such as "forward 0", each with a bool for each layer: is it whole?
    """
    layers = len(seen[0][1])
    top = 0.85 + layers * ROW
    figure, ax = canvas(top + 0.95)
    colour, width = RANK_COLOURS[0], COLUMN - 0.16
    for layer in range(layers):
        label(ax, 0.1, top - (layer + 0.5) * ROW, f"layer {layer}", align="left", size=SMALL)
    for column, (moment, whole) in enumerate(seen):
        left = LEFT + column * COLUMN
        middle = left + width / 2
        label(ax, middle, top + 0.18, moment.replace(" ", "\n"), size=SMALL)
        for layer, is_whole in enumerate(whole):
            for part in range(world_size):
                face = tint(colour, 0.75) if part == 0 else tint(colour, 0.28) if is_whole else PAPER
                corner = (left + part * width / world_size, top - (layer + 1) * ROW + 0.06)
                ax.add_patch(Rectangle(corner, width / world_size, ROW - 0.12, facecolor=face, edgecolor=LINE, lw=0.6))
        if any(whole):
            arrow(ax, (middle, top + 0.68), (middle, top + 0.38))
            label(ax, middle, top + 0.8, "all_gather", size=SMALL - 1)
        if moment.startswith("backward"):
            arrow(ax, (middle, top - layers * ROW - 0.02), (middle, top - layers * ROW - 0.27))
            label(ax, middle, top - layers * ROW - 0.46, "reduce_\nscatter", size=SMALL - 1)
    key = f"rank 0 of {world_size} on CPUs; dark: its own shard; light: gathered. "
    key += "A GPU gathers the next layer meanwhile."
    label(ax, 0.1, 0.1, key, align="left", size=SMALL, ink=MUTED)
    most = max(sum(whole) for _, whole in seen)
    finding(ax, f"Of {layers} layers at most {most} {'is' if most == 1 else 'are'} whole at one moment")
    return figure


def owners(panels: Mapping[str, tuple[str, str, Sequence[Sequence[int | str | None]]]], title: str) -> Figure:
    """Matrices side by side: in each cell the rank that has it, grey where all ranks do, white where none does.

    Args:
        panels: for each name, what a row is, what a column is, and the rows, of ranks, "all" and None.
    """
    columns = sum(len(rows[0]) for *_, rows in panels.values())
    cell = min(0.27, (WIDTH - GAP * len(panels) - 0.2) / columns)
    middle = max(len(rows) for *_, rows in panels.values()) * cell / 2 + 0.6
    figure, ax = canvas(2 * middle)
    left = (WIDTH - columns * cell - GAP * (len(panels) - 1)) / 2
    for name, (row, column, rows) in panels.items():
        right, half = left + len(rows[0]) * cell, len(rows) * cell / 2
        label(ax, (left + right) / 2, middle + half + 0.08, name, bold=True, size=SMALL).set_va("bottom")
        label(ax, (left + right) / 2, middle - half - 0.13, column, size=SMALL - 1, ink=MUTED)
        label(ax, left - 0.13, middle, row, size=SMALL - 1, ink=MUTED).set_rotation(90)
        for down, across in ((down, across) for down in range(len(rows)) for across in range(len(rows[0]))):
            x, y, rank = left + across * cell, middle + half - (down + 1) * cell, rows[down][across]
            face = {"all": FAINT, None: PAPER}.get(rank) or tint(rank_colour(rank), 0.4)
            ax.add_patch(Rectangle((x, y), cell, cell, facecolor=face, edgecolor=LINE, lw=0.3))
            if isinstance(rank, int):
                label(ax, x + cell / 2, y + cell / 2, str(rank), size=SMALL - 3)
        left = right + GAP
    seen = {rank for *_, rows in panels.values() for row in rows for rank in row}
    key = "a number is the rank that has it"
    key += "; grey: all ranks have it" * ("all" in seen) + "; white: no rank computes it" * (None in seen)
    label(ax, 0.1, 0.12, key, align="left", size=SMALL, ink=MUTED)
    finding(ax, title)
    return figure
