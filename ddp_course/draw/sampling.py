"""Which sample goes to which rank, and how does a formula shuffle?

Read next: `parallel/`.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from ddp_course.draw.shapes import box, canvas, finding, label
from ddp_course.draw.style import ALARM, INK, MUTED, SMALL, WIDTH, rank_colour


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
