"""Where do the ranks live, what travels between them, and what does a missing call look like?

Read next: `membership.py` (who is who), `training.py` (what a training step does).
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from ddp_course.draw.shapes import arrow, box, canvas, finding, label, number
from ddp_course.draw.style import ALARM, MUTED, SMALL, WIDTH, rank_colour

ROW = 0.62  # inches from one rank's box to the next


def all_reduce(before: Sequence[float], after: Sequence[float], operation: str = "sum") -> Figure:
    """One all_reduce: what each rank put in, the operation's name, and what each rank has afterwards."""
    world_size, left = len(before), 0.95
    figure, ax = canvas(2.8)
    column = (WIDTH - left + 0.1) / world_size
    label(ax, 0.12, 2.2, "before", ink=MUTED, align="left")
    label(ax, 0.12, 0.34, "after", ink=MUTED, align="left")
    box(ax, left, 1.07, column * world_size - 0.2, 0.4, f"all_reduce: {operation}", bold=True)
    for rank, (mine, ours) in enumerate(zip(before, after, strict=True)):
        x, colour = left + column * rank, rank_colour(rank)
        centre = x + (column - 0.2) / 2
        label(ax, centre, 2.62, f"rank {rank}", bold=True)
        box(ax, x, 1.98, column - 0.2, 0.44, number(mine), colour=colour)
        arrow(ax, (centre, 1.95), (centre, 1.5), colour=colour)
        arrow(ax, (centre, 1.04), (centre, 0.59), colour=colour)
        box(ax, x, 0.12, column - 0.2, 0.44, number(ours), colour=colour)
    if len(set(after)) == 1:
        finding(ax, f"Each rank puts in its own number, and each gets the same result: {number(after[0])}")
    return figure


def collective_calls(calls: Sequence[Sequence[str]]) -> Figure:
    """The names of the collectives that each rank entered, in order: a column is complete when every rank arrived."""
    world_size, steps = len(calls), max(len(mine) for mine in calls)
    height = ROW * world_size + 0.5
    figure, ax = canvas(height)
    left, column = 1.0, (WIDTH - 1.15) / steps
    for step in range(steps):
        here = sum(len(mine) > step for mine in calls)
        verdict = (
            "all arrived: done"
            if here == world_size
            else f"{here} of {world_size} arrived: {'it waits' if here == 1 else 'they wait'}"
        )
        ink = MUTED if here == world_size else ALARM
        centre = left + column * (step + 0.5) - 0.06
        label(ax, centre, height - 0.22, f"call {step + 1}: {verdict}", size=SMALL, ink=ink)
    for rank, mine in enumerate(calls):
        y = 0.1 + ROW * (world_size - 1 - rank) + 0.08
        label(ax, 0.15, y + (ROW - 0.16) / 2, f"rank {rank}", bold=True, align="left")
        for step in range(steps):
            place = (left + column * step, y, column - 0.12, ROW - 0.16)
            if step < len(mine):
                box(ax, *place, mine[step], colour=rank_colour(rank), mono=True, size=SMALL)
            else:
                box(ax, *place, "not called", colour=ALARM, ink=ALARM, fill=False, dashed=True, size=SMALL)
    finding(ax, _who_is_missing(calls))
    return figure


def _who_is_missing(calls: Sequence[Sequence[str]]) -> str:
    """The first call that not every rank made, and who waits in it for whom."""
    fewest, most = min(map(len, calls)), max(map(len, calls))
    if fewest == most:
        return "Every rank made every call, so none waits"
    arrived = [rank for rank, mine in enumerate(calls) if len(mine) > fewest]
    missing = [rank for rank in range(len(calls)) if rank not in arrived]
    if len(arrived) == 1 < len(missing):
        return f"Only rank {arrived[0]} made call {fewest + 1}, so it waits alone"
    who = f"Rank {missing[0]} never made" if len(missing) == 1 else f"{len(missing)} ranks never made"
    waiting = f"rank {arrived[0]} waits" if len(arrived) == 1 else f"the other {len(arrived)} ranks wait"
    return f"{who} call {fewest + 1}, so {waiting}"
