"""Which gradients travel together, and how large is each parcel?

Read next: `timelines.py`, when the buckets travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Protocol

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn

from ddp_course.draw.shapes import arrow, canvas, finding, label
from ddp_course.draw.style import MUTED, PAPER, SMALL, rank_colour, tint

ROW = 0.5
LEFT, BAR = 1.55, 3.2  # inches: where the bars begin, and how long the largest is
NAMES_WIDTH = 36  # letters that fit beside the longest bar


class HasGradients(Protocol):
    """What the picture needs to know of a bucket; `parallel.bucketing.Bucket` has it."""

    names: Sequence[str]
    numels: Sequence[int]
    dtype: torch.dtype


def size_text(n_bytes: float) -> str:
    """A size with its unit, in powers of 1024, as bucket caps are counted: "1.5 MiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes:.0f} B"


def bucket_plan(buckets: Sequence[HasGradients] | Sequence[Sequence[str]], module: nn.Module | None = None) -> Figure:
    """One row per bucket, first launched on top; a piece of the bar for each gradient, as long as it is large.

    Args:
        module: has the parameters, if a bucket is only the list of their names.
    """
    if module is not None:
        buckets = [_named(names, module) for names in buckets]
    height = ROW * len(buckets) + 0.5
    figure, ax = canvas(height)
    sizes = [sum(bucket.numels) * bucket.dtype.itemsize for bucket in buckets]
    label(ax, 0.15, height - 0.22, "backward", size=SMALL, ink=MUTED, align="left")
    arrow(ax, (0.32, height - 0.4), (0.32, 0.1))
    label(ax, LEFT, height - 0.22, "one piece for each gradient, first ready on the left", size=SMALL, align="left")
    for row, (bucket, size) in enumerate(zip(buckets, sizes, strict=True)):
        y = height - 0.45 - ROW * (row + 1) + 0.06
        label(ax, 0.5, y + 0.19, f"bucket {row}", bold=True, align="left")
        carries = f"{size_text(size)} in {_counted(len(bucket.names), 'gradient')}"
        end = _pieces(ax, bucket, y, BAR / max(sizes))
        label(ax, end + 0.12, y + 0.27, carries, align="left", size=SMALL)
        label(ax, end + 0.12, y + 0.09, _between(bucket.names), align="left", size=SMALL - 1, ink=MUTED)
    gradients = _counted(sum(len(bucket.names) for bucket in buckets), "gradient")
    finding(ax, f"{gradients} in {_counted(len(buckets), 'message')}: what is ready first leaves first")
    return figure


def _named(names: Sequence[str], module: nn.Module) -> HasGradients:
    parameters = [module.get_parameter(name) for name in names]
    return SimpleNamespace(names=names, numels=[p.numel() for p in parameters], dtype=parameters[0].dtype)


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number > 1)}"


def _pieces(ax: Axes, bucket: HasGradients, y: float, inches_per_byte: float) -> float:
    """Draw the bar of a bucket and return where it ends."""
    x = LEFT
    for place, numel in enumerate(bucket.numels):
        width = numel * bucket.dtype.itemsize * inches_per_byte
        colour = tint(rank_colour(0), 0.5 if place % 2 else 0.25)
        ax.add_patch(Rectangle((x, y), width, 0.36, facecolor=colour, edgecolor=PAPER, linewidth=0.4))
        x += width
    ax.add_patch(Rectangle((LEFT, y), x - LEFT, 0.36, facecolor="none", edgecolor=rank_colour(0), linewidth=1.2))
    return x


def _between(names: Sequence[str]) -> str:
    """The first and the last name, cut at the front where they are long: the end of a name tells more."""
    ends = [names[0]] if len(names) == 1 else [names[0], names[-1]]
    most = NAMES_WIDTH // len(ends) - 2
    return " to ".join(name if len(name) <= most else "…" + name[1 - most :] for name in ends)
