"""What do the ranks play, and what do they learn together?

Read next: `shapes.py`, whose boxes and arrows these are.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from ddp_course.draw.shapes import arrow, box, canvas, finding, label
from ddp_course.draw.style import (
    FAINT,
    INK,
    SMALL,
    WIDTH,
    rank_colour,
)


def players(world_size: int = 2, num_envs: int = 8) -> Figure:
    """One turn: each rank plays games of its own, and two things are averaged or added up over the ranks."""
    figure, ax = canvas(3.6)
    width = (WIDTH - 0.2) / world_size
    for rank in range(world_size):
        x, colour = 0.1 + rank * width, rank_colour(rank)
        box(ax, x + 0.05, 0.1, width - 0.1, 1.85, colour=FAINT, fill=False)
        label(ax, x + 0.2, 1.75, f"rank {rank}", bold=True, align="left", ink=INK)
        inner = (width - 0.5) / 2
        box(ax, x + 0.15, 0.3, inner, 1.15, f"{num_envs} games,\nown starts,\nown actions", colour=colour, size=SMALL)
        box(ax, x + 0.35 + inner, 0.3, inner, 1.15, "replica of\nactor, critic:\nequal weights", size=SMALL)
        arrow(ax, (x + 0.16 + inner, 0.95), (x + 0.34 + inner, 0.95), colour=colour, both_ways=True)
        arrow(ax, (x + width / 2, 1.97), (x + width / 2, 2.33), colour=colour, both_ways=True)
    box(ax, 0.15, 2.35, WIDTH - 0.3, 1.1)
    label(ax, WIDTH / 2, 3.15, "between the ranks", bold=True)
    label(ax, WIDTH / 2, 2.85, "before learning: count, sum and sum of squares of the advantages", size=SMALL)
    label(ax, WIDTH / 2, 2.58, "in each learning step: the gradient, averaged by DDP. No state, action or reward",
          size=SMALL)  # fmt: skip
    finding(ax, "Each rank plays games of its own; in training only gradients and three sums travel")
    return figure
