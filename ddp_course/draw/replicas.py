"""What keeps replicas equal, and what differs when it does not hold?

Read next: `buckets.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from ddp_course.draw.shapes import box, canvas, finding, label
from ddp_course.draw.style import ALARM, INK, MUTED, SMALL, WIDTH, rank_colour

COMPARED = ("same start", "same gradient", "same step", "replicas", "one process")
MOMENTS = ("before training", "at its worst", "at its worst", "after training", "after training")
ROUNDING = 1e-12  # of numbers in float64 that were added in another order


def conditions(runs: Mapping[str, Sequence[float]], columns: Sequence[str] = COMPARED) -> Figure:
    """One row a run, one column a comparison: the largest difference there, or "equal" if it is 0.

    The last two columns, beyond the line, are the outcome: between ranks, and from one process on the whole batch. A
    difference below ROUNDING counts as none. Below each name stands at which of MOMENTS was compared.
    """
    row, top = 0.62, 0.62
    height = top + row * len(runs) + 0.1
    figure, ax = canvas(height)
    left = 2.3
    column = (WIDTH - left) / len(columns)
    for place, (name, moment) in enumerate(zip(columns, MOMENTS, strict=False)):
        x = left + column * (place + 0.5) - 0.06
        label(ax, x, height - 0.26, name, bold=True)
        label(ax, x, height - 0.49, moment, size=SMALL, ink=MUTED)
    told = []  # which boxes are red, for those who do not see them
    for number, (run, differences) in enumerate(runs.items()):
        red = [
            f"{name} {_short(value)} apart"
            for name, value in zip(columns, differences, strict=False)
            if value >= ROUNDING
        ]
        told.append(f"{run}: {', '.join(red) or 'no red box'}.")
        y = height - top - row * (number + 1)
        label(ax, 0.12, y + row / 2, run, align="left", bold=True)
        for place, difference in enumerate(differences):
            right = difference < ROUNDING
            text = "equal" if difference == 0 else "rounding" if right else f"{_short(difference)} apart"
            colour = rank_colour(2) if right else ALARM
            x = left + column * place
            box(ax, x, y + 0.08, column - 0.12, row - 0.16, text, colour=colour, ink=INK if right else ALARM)
    ax.says = f"Red boxes of each row, from left to right. {' '.join(told)}"
    ax.plot([left + column * (len(columns) - 2) - 0.06] * 2, [0.08, height - 0.12], color=MUTED, linewidth=1.2)
    finding(ax, "Left of the line, the first red box is what broke")
    return figure


def _short(difference: float) -> str:
    """At most six letters, which fit in a box: 123, 0.052, 1e-05."""
    return f"{difference:.0f}" if difference >= 10 else f"{difference:.{1 if difference < 1e-3 else 2}g}"
