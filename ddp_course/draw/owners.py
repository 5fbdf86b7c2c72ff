"""Which rank has which part of a matrix?

Left out on purpose: the numbers in the matrix.
Read next: lesson 18, notebooks/18_model_parallel.ipynb.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ddp_course.draw.shapes import canvas, finding, label
from ddp_course.draw.style import FAINT, LINE, MUTED, PAPER, SMALL, WIDTH, rank_colour, tint

GAP = 0.55  # inches between two matrices, for the words beside each


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
