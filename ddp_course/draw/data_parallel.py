"""How is a batch divided among replicas, and what does each hold?

Read next: `collectives.py`, what the ranks do to average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ddp_course.draw.shapes import arrow, box, canvas, finding, label
from ddp_course.draw.style import ALARM, INK, SMALL, WIDTH, rank_colour, tint


def shard_gradients(
    samples: Sequence[int], gradients: Sequence[float], whole: float, *, weighted: bool = True
) -> Figure:
    """A batch cut into shards as wide as their samples, the gradient of each, and their mean beside the batch's own.

    Args:
        samples, gradients: of each shard; the gradient of its mean loss by one weight.
        whole: gradient of the batch's mean loss by that weight.
        weighted: weigh the shards by their samples; else all alike.
    """
    figure, ax = canvas(3.9)
    left, span, total = 1.75, WIDTH - 1.9, sum(samples)
    weights = [n / total for n in samples] if weighted else [1 / len(samples)] * len(samples)
    one = "gradient of\none parameter"
    alike = len(set(samples)) == 1  # then the weights say nothing
    for y, name in ((3.5, "batch"), (2.68, "shards"), (1.86, one), (0.55, "mean")):
        label(ax, 0.12, y, name, align="left", bold=True)
    label(ax, 0.12, 1.2, f"add,\ndivide by {len(samples)}" if alike else "weight", align="left", bold=True)
    box(ax, left, 3.28, span, 0.44, f"{total} samples, gradient {whole:.5f}")
    x = left
    for rank, (n, gradient) in enumerate(zip(samples, gradients, strict=True)):
        width, colour = span * n / total, rank_colour(rank)
        middle = x + width / 2
        box(ax, x + 0.03, 2.46, width - 0.06, 0.44, f"{n} samples", colour=colour, size=SMALL)
        label(ax, middle, 1.86, f"{gradient:.5f}", size=SMALL)
        if not alike:
            label(ax, middle, 1.2, f"× {n}/{total}" if weighted else f"× 1/{len(samples)}", size=SMALL)
        for start, end in ((3.24, 2.94), (2.42, 2.04), *([(1.68, 0.78)] if alike else [(1.68, 1.38), (1.02, 0.78)])):
            arrow(ax, (middle, start), (middle, end), colour=colour)
        x += width
    mean = sum(weight * gradient for weight, gradient in zip(weights, gradients, strict=True))
    agrees = abs(mean - whole) <= 1e-12
    verdict = ": the batch's gradient" if agrees else f", but the batch has {whole:.5f}"
    box(ax, left, 0.33, span, 0.42, f"{mean:.5f}{verdict}", ink=INK if agrees else ALARM, bold=True)
    how = "Shards weighted by samples" if weighted else "Shards that count alike"
    finding(ax, f"{how}: the mean of their gradients is {'' if agrees else 'not '}the gradient of the batch")
    return figure


def stacked(bars: Mapping[str, Mapping[str, float]], unit: str, title: str) -> Figure:
    """Horizontal bars, each stacked from the same parts; a part has its number where it fits, a bar its sum.

    Args:
        bars: by bar, the size of each part; all bars have the same parts.
    """
    parts = list(next(iter(bars.values())))
    row, left = 0.62, 1.7
    figure, ax = canvas(row * len(bars) + 0.3 * ((len(parts) + 1) // 2) + 0.25)
    finding(ax, title)
    height = ax.get_ylim()[1]
    scale = (WIDTH - left - 1.0) / max(sum(sizes.values()) for sizes in bars.values())
    for place, (name, sizes) in enumerate(bars.items()):
        y, x = height - row * (place + 0.5), left
        label(ax, left - 0.12, y, name, align="right")
        for index, size in enumerate(sizes.values()):
            _bar(ax, x, y, size * scale, 0.42, tint(rank_colour(index), 0.55))
            if size * scale > 0.35:
                label(ax, x + size * scale / 2, y, f"{size:.3g}", size=SMALL)
            x += size * scale
        label(ax, x + 0.1, y, f"{sum(sizes.values()):.3g} {unit}", size=SMALL, align="left", bold=True)
    for index, part in enumerate(parts):
        x, y = 0.4 + 3.4 * (index % 2), 0.3 * ((len(parts) + 1) // 2 - index // 2) - 0.05
        _bar(ax, x, y, 0.2, 0.16, tint(rank_colour(index), 0.55))
        label(ax, x + 0.28, y, part, size=SMALL, align="left")
    return figure


def _bar(ax: Axes, x: float, middle: float, width: float, height: float, colour: str | tuple) -> None:
    """A bar in inches; no `barh`, whose width would be read out as if it were the number."""
    ax.add_patch(Rectangle((x, middle - height / 2), width, height, color=colour))
