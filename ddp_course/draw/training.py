"""What does a data parallel step do, and what does each rank see?

Read next: `overview.py`, the picture of the README.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddp_course.draw.charts import legend_beside, name_axes
from ddp_course.draw.shapes import arrow, box, canvas, finding, label, number
from ddp_course.draw.style import INK, MUTED, SMALL, WIDTH, rank_colour


def data_parallel_step(
    before: Sequence[float],
    shards: Sequence[object],
    gradients: Sequence[float],
    averaged: Sequence[float],
    after: Sequence[float],
) -> Figure:
    """One training step: same weight, own shard, own gradient, mean, same weight; each argument by rank."""
    figure, ax = canvas(4.3)
    left, world_size = 2.1, len(before)
    column = (WIDTH - left + 0.1) / world_size
    columns = [(left + column * rank, column - 0.2) for rank in range(world_size)]
    _one_a_rank(ax, 3.5, "weight", before, columns, shared=True)
    _one_a_rank(ax, 2.75, "its shard", shards, columns)
    _one_a_rank(ax, 2.0, "its own gradient", gradients, columns)
    box(ax, left, 1.5, column * world_size - 0.2, 0.28, "all_reduce, then divide by the number of ranks", size=SMALL)
    _one_a_rank(ax, 0.85, "gradient, averaged", averaged, columns, shared=True)
    _one_a_rank(ax, 0.1, "weight, updated", after, columns, shared=True)
    for rank, (x, width) in enumerate(columns):
        middle = x + width / 2
        label(ax, middle, 4.12, f"rank {rank}", bold=True)
        for start, end in ((3.48, 3.21), (2.73, 2.46), (1.98, 1.8), (1.48, 1.31), (0.83, 0.56)):
            arrow(ax, (middle, start), (middle, end), colour=rank_colour(rank))
    equal = len(set(after)) == 1
    finding(ax, f"Each rank has its own gradient; the weights {'stay equal' if equal else 'become different'}")
    return figure


def _one_a_rank(
    ax: Axes, y: float, name: str, values: Sequence, columns: Sequence[tuple[float, float]], shared: bool = False
) -> None:
    """A row with a value for each rank; `shared` if the ranks are to have the same."""
    note = "the same on all ranks" if len(set(values)) == 1 else "not the same on all ranks"
    label(ax, 0.12, y + 0.33, name, align="left", bold=True)
    label(ax, 0.12, y + 0.1, note if shared else "each rank has its own", align="left", size=SMALL, ink=MUTED)
    for rank, (value, (x, width)) in enumerate(zip(values, columns, strict=True)):
        box(ax, x, y, width, 0.44, number(value), colour=rank_colour(rank))


def shards(images: Sequence[np.ndarray], labels: Sequence[Sequence[int]], indices: Sequence[Sequence[int]]) -> Figure:
    """The first images of each rank's shard: one row a rank, the label above each image, its index below.

    Args:
        images: by rank, an array of shape (images, height, width).
        labels, indices: by rank, the class of each image and its place in the dataset.
    """
    world_size, count, row = len(images), len(images[0]), 1.2
    height = row * world_size + 0.08
    figure, ax = canvas(height)
    left = 1.0
    column = (WIDTH - left - 0.1) / count
    side = min(0.62, column - 0.1)
    for rank in range(world_size):
        base = height - row * (rank + 1)
        box(ax, 0.08, base + 0.04, WIDTH - 0.16, row - 0.1, colour=rank_colour(rank))
        label(ax, 0.2, base + 0.58, f"rank {rank}", bold=True, align="left")
        for place in range(count):
            x = left + column * (place + 0.5)
            _image(ax, images[rank][place], x - side / 2, base + 0.27, side)
            label(ax, x, base + 1.0, str(labels[rank][place]), size=SMALL)
            label(ax, x, base + 0.15, f"#{indices[rank][place]}", size=SMALL - 1, ink=MUTED)
    in_turn = all(list(mine) == [rank + world_size * n for n in range(count)] for rank, mine in enumerate(indices))
    told = "The ranks take turns" if in_turn else "The ranks take no turns"
    finding(ax, f"{told}: the first {count} images of each shard (above: the label, below: the index)")
    return figure


def _image(ax: Axes, pixels: np.ndarray, x: float, y: float, side: float) -> None:
    extent = (x, x + side, y, y + side)
    ax.imshow(pixels, cmap="gray_r", extent=extent, aspect="auto", zorder=3, interpolation="nearest")


def plot_losses(ax: Axes, by_rank: Sequence[Sequence[float]], mean: Sequence[float], unit: str) -> None:
    """Draw the loss of each rank, thin, and the mean over the ranks, thick, into axes of a larger picture."""
    points = range(1, len(mean) + 1)
    for rank, mine in enumerate(by_rank):
        colour = rank_colour(rank)
        ax.plot(points, mine, color=colour, linewidth=1.3, marker="o", markersize=3.5, label=f"rank {rank}")
    ax.plot(points, mean, color=INK, linewidth=2.4, label="mean over ranks", zorder=1)
    name_axes(ax, unit, "training loss")
    ax.set_yscale("log")  # late losses are small, and there the ranks differ most
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")
    ax.xaxis.get_major_locator().set_params(integer=True)
    legend_beside(ax)
