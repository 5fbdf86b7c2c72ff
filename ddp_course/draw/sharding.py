"""When is a layer whole under FSDP?

Left out on purpose: how long a layer computes, and the gathering of the next one meanwhile.
Read next: lesson 17, notebooks/17_sharding.ipynb.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ddp_course.draw.shapes import arrow, canvas, finding, label
from ddp_course.draw.style import LINE, MUTED, PAPER, RANK_COLOURS, SMALL, tint

LEFT, COLUMN, ROW = 0.95, 0.83, 0.36


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
