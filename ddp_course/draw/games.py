"""What do the ranks play, and what do they learn together?

Read next: `shapes.py`, whose boxes and arrows these are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ddp_course.draw.charts import headline, legend, name_axes, page, plain_axes
from ddp_course.draw.shapes import arrow, box, canvas, finding, label
from ddp_course.draw.style import (
    ALARM,
    FAINT,
    HEADING,
    INK,
    LINE,
    MUTED,
    RANK_COLOURS,
    SHARED,
    SMALL,
    WIDTH,
    rank_colour,
)

TRACK = 2.4  # the cart may leave the middle by so much
DASHES = ("-", "--", ":", "-.")


def cart_poses(episodes: Mapping[str, Sequence[Sequence[float]]], moments: int = 6) -> Figure:
    """Some moments of real episodes, from left to right: the cart on its track, and the pole at its true angle.

    Args:
        episodes: for each name, the states of one episode in order: place, speed, angle, speed of the angle; one
            before each step, and one after the last.
    """
    figure, ax = canvas(1.5 * len(episodes) + 0.1)
    for row, (name, states) in enumerate(episodes.items()):
        bottom = 1.5 * (len(episodes) - 1 - row) + 0.1
        label(ax, 0.15, bottom + 1.25, f"{name}: {len(states) - 1} steps", align="left", bold=True)
        for i in range(moments):
            step = round(i * (len(states) - 1) / (moments - 1))
            _cart(ax, 0.15 + i * 1.3, bottom, states[step], step)
    ax.set_aspect("equal")
    lasted = "; ".join(f"{name}, the game lasts {len(states) - 1} steps" for name, states in episodes.items())
    finding(ax, f"{lasted[:1].upper()}{lasted[1:]} (red: lost)")
    return figure


def _cart(ax: Axes, left: float, bottom: float, state: Sequence[float], step: int) -> None:
    """One moment in a field 1.2 inches wide; the track's ends are the places where the episode is lost."""
    place, _, angle, _ = state
    middle, ground = left + 0.6 + 0.48 * place / TRACK, bottom + 0.32
    ax.plot([left + 0.12, left + 1.08], [ground, ground], color=LINE, linewidth=1.2)
    for end in (left + 0.12, left + 1.08):
        ax.plot([end, end], [ground - 0.05, ground + 0.05], color=LINE, linewidth=1.2)
    lost = abs(angle) > 12 * math.pi / 180 or abs(place) > TRACK
    ax.add_patch(Rectangle((middle - 0.1, ground), 0.2, 0.11, color=ALARM if lost else RANK_COLOURS[0], zorder=3))
    tip = (middle + 0.55 * math.sin(angle), ground + 0.11 + 0.55 * math.cos(angle))
    ax.plot([middle, tip[0]], [ground + 0.11, tip[1]], color=ALARM if lost else RANK_COLOURS[1], linewidth=3, zorder=4)
    label(ax, left + 0.6, bottom + 0.12, f"step {step}: {round(math.degrees(angle))}°", size=SMALL, ink=MUTED)


def players(world_size: int = 2, num_envs: int = 8) -> Figure:
    """One turn: each rank plays games of its own, and two things are averaged or added up over the ranks."""
    figure, ax = canvas(3.6)
    width = (WIDTH - 0.2) / world_size
    for rank in range(world_size):
        x, colour = 0.1 + rank * width, rank_colour(rank)
        box(ax, x + 0.05, 0.1, width - 0.1, 1.85, colour=FAINT, fill=False)
        label(ax, x + 0.2, 1.75, f"rank {rank}", bold=True, align="left", ink=INK)
        inner = (width - 0.5) / 2
        box(ax, x + 0.15, 0.3, inner, 1.15, f"{num_envs} games\nown seed,\nown dice", colour=colour, size=SMALL)
        box(ax, x + 0.35 + inner, 0.3, inner, 1.15, "replica of\nactor, critic:\nequal weights", size=SMALL)
        arrow(ax, (x + 0.16 + inner, 0.95), (x + 0.34 + inner, 0.95), colour=colour, both_ways=True)
        arrow(ax, (x + width / 2, 1.97), (x + width / 2, 2.33), colour=colour, both_ways=True)
    box(ax, 0.15, 2.35, WIDTH - 0.3, 1.1)
    label(ax, WIDTH / 2, 3.15, "between the ranks", bold=True)
    label(ax, WIDTH / 2, 2.85, "before learning: sums and counts of advantages and returns, five numbers", size=SMALL)
    label(ax, WIDTH / 2, 2.58, "in each learning step: the gradient, averaged by DDP. No state, no action, no reward",
          size=SMALL)  # fmt: skip
    finding(ax, "Each rank plays games of its own; only gradients and five sums travel")
    return figure


def episode_ends() -> Figure:
    """The rows around an end of each kind: what follows the last row, and which row nobody learns from."""
    figure, ax = canvas(2.95)
    cases = (("terminated", "the pole fell", "value 0", ALARM), ("truncated", "time limit", "critic's value", SHARED))
    for row, (kind, why, after, colour) in enumerate(cases):
        y = 1.75 - 1.35 * row
        label(ax, 0.15, y + 0.42, kind, bold=True, align="left")
        label(ax, 0.15, y + 0.15, why, size=SMALL, ink=MUTED, align="left")
        texts = ("plays", "plays", kind, "begins only", "plays", "plays")
        for i, text in enumerate(texts):
            x, empty = 1.5 + 1.07 * i, i == 3
            edge = FAINT if empty else colour if i == 2 else RANK_COLOURS[0 if i < 3 else 2]
            box(ax, x, y, 1.0, 0.6, text, colour=edge, dashed=empty, fill=not empty, size=SMALL,
                ink=MUTED if empty else INK)  # fmt: skip
        label(ax, 1.5 + 1.07 * 2 + 0.5, y - 0.2, f"then: {after}", size=SMALL, bold=True, ink=colour)
        label(ax, 1.5 + 1.07 * 3 + 0.5, y + 0.78, "reward 0, left out", size=SMALL, ink=MUTED)
    label(ax, 1.5, 2.8, "one episode", size=SMALL, ink=RANK_COLOURS[0], align="left")
    label(ax, 1.5 + 1.07 * 4, 2.8, "the next episode", size=SMALL, ink=RANK_COLOURS[2], align="left")
    finding(ax, "Nothing follows a fall; the critic's value follows a time limit; one row is left out")
    return figure


def return_curves(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float | None]]], solved: float = 475.0, window: int = 5
) -> Figure:
    """Mean return against the environment steps of all ranks, and of several runs against the turns beside it.

    Args:
        curves: for each run the steps after each turn, and the mean return of the episodes that ended in it.
        window: so many turns with an ended episode are averaged for a point.
    """
    figure = page(3.4)
    panels = figure.subplots(1, 2 if len(curves) > 1 else 1, sharey=True, squeeze=False)[0]
    first, second = panels[0], panels[-1]
    for ax in panels:
        plain_axes(ax)
    for (name, (steps, returns)), dash, colour in zip(curves.items(), DASHES, RANK_COLOURS, strict=False):
        places, values = _running_mean(returns, window)
        style = {"color": colour, "linestyle": dash, "linewidth": 2, "marker": "o", "markersize": 4}
        first.plot([steps[i] for i in places], values, label=name, **style)
        if second is not first:
            second.plot([i + 1 for i in places], values, **style)
    for ax, what in zip(panels, ("steps of all ranks' games", "turns"), strict=False):
        ax.axhline(solved, color=MUTED, linewidth=1, label=f"solved: {solved:.0f}" if ax is first else None)
        name_axes(ax, what, "mean return" if ax is first else "")
    first.locator_params(axis="x", nbins=6)
    first.set_ylim(0, 520)
    legend(first, loc="lower right")
    ends = ", ".join(f"{name}: {_first_solved(*run, solved, window)}" for name, run in curves.items())
    headline(first, f"Mean training return of {ends}")
    return figure


def _first_solved(steps: Sequence[int], returns: Sequence[float | None], solved: float, window: int) -> str:
    """Name the first point that is solved, or else the last one."""
    places, values = _running_mean(returns, window)
    at = next((at for at, value in enumerate(values) if value >= solved), -1)
    return f"{values[at]:.0f} after {steps[places[at]]:,} steps"


def return_bands(
    runs: Mapping[str, Sequence[tuple[Sequence[float | None], float]]], solved: float = 475.0, window: int = 5
) -> Figure:
    """Mean return over several seeds, with the lowest and the highest: against the turns, and against seconds.

    Args:
        runs: for each name and each seed, the mean return of the episodes that ended in each turn, and the seconds
            that all turns took.
        window: so many turns are averaged for a point; a turn without an ended episode has the return of the last one.
    """
    figure = page(3.6)
    panels = figure.subplots(1, 2, sharey=True)
    means, paces, many = {}, [], len(next(iter(runs.values())))
    for (name, seeds), dash, colour in zip(runs.items(), DASHES, RANK_COLOURS, strict=False):
        curves = [_without_gaps(returns, window) for returns, _ in seeds]
        middle = [sum(at) / len(at) for at in zip(*curves, strict=True)]
        low, high = ([most(at) for at in zip(*curves, strict=True)] for most in (min, max))
        turns = len(middle)
        paces.append(sum(seconds for _, seconds in seeds) / len(seeds) / turns)
        means[name] = middle
        for ax, scale in zip(panels, (1, paces[-1]), strict=True):
            places = [(turn + 1) * scale for turn in range(turns)]
            ax.fill_between(places, low, high, color=colour, alpha=0.14, linewidth=0)
            ax.plot(places, middle, label=name, color=colour, linestyle=dash, linewidth=2)
    for ax, what in zip(panels, ("turns", "seconds on this machine"), strict=True):
        plain_axes(ax)
        ax.axhline(solved, color=MUTED, linewidth=1, label=f"solved: {solved:.0f}")
        name_axes(ax, what, f"mean return of {many} seeds; shaded: range" if ax is panels[0] else "")
    panels[0].set_ylim(0, 520)
    legend(panels[0], loc="upper left", bbox_to_anchor=(0, 0.9))
    title = f"Return after {turns} turns: {_reached(means, [turns] * len(means))}"
    if len(means) > 1:
        seconds = turns * min(paces)  # when the fastest has ended
        title += f"; after {seconds:.1f} s: {_reached(means, [int(seconds / pace + 1e-6) for pace in paces])}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=HEADING, color=INK, weight="bold")
    return figure


def _reached(means: Mapping[str, Sequence[float]], turns: Sequence[int]) -> str:
    """Name each mean return after its number of turns."""
    pairs = zip(means.items(), turns, strict=True)
    return ", ".join(f"{name} {mean[max(turn, 1) - 1]:.0f}" for (name, mean), turn in pairs)


def _without_gaps(values: Sequence[float | None], window: int) -> list[float]:
    """Fill each gap with the value before it, and return the running mean."""
    filled: list[float] = []
    first = next((value for value in values if value is not None), 0.0)
    for value in values:
        filled.append(value if value is not None else filled[-1] if filled else first)
    return _running_mean(filled, window)[1]


def _running_mean(values: Sequence[float | None], window: int) -> tuple[list[int], list[float]]:
    """Return the places that have a value, and for each the mean of the last `window` values."""
    places = [i for i, value in enumerate(values) if value is not None]
    known = [values[i] for i in places]
    means = [sum(part) / len(part) for part in (known[max(0, i - window + 1) : i + 1] for i in range(len(known)))]
    return places, means


def seed_table(seeds: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """The seeds by run and rank, one table for each rule; a seed that occurs twice is marked."""
    widest = max(len(runs[0]) for runs in seeds.values())
    height = max(len(runs) for runs in seeds.values())
    figure, ax = canvas(0.42 * height + 1.0)
    width = (WIDTH - 0.2) / len(seeds)
    cell = (width - 0.95) / widest
    for place, (name, runs) in enumerate(seeds.items()):
        x, flat = 0.1 + place * width, [seed for run in runs for seed in run]
        label(ax, x + 0.1, 0.42 * height + 0.78, name, bold=True, align="left")
        for rank in range(widest):
            label(ax, x + 0.8 + (rank + 0.5) * cell, 0.42 * height + 0.42, f"rank {rank}", size=SMALL, ink=MUTED)
        for i, run in enumerate(runs):
            y = 0.42 * (height - 1 - i) + 0.15
            label(ax, x + 0.1, y + 0.19, f"run {i}", size=SMALL, ink=MUTED, align="left")
            for rank, seed in enumerate(run):
                twice = flat.count(seed) > 1
                box(ax, x + 0.8 + rank * cell + 0.03, y + 0.02, cell - 0.06, 0.34, f"{seed}", size=SMALL,
                    colour=ALARM if twice else rank_colour(rank), dashed=twice)  # fmt: skip
    different = [f"{len(set(sum(map(list, runs), [])))} by {name}" for name, runs in seeds.items()]
    of = sum(map(len, next(iter(seeds.values()))))
    finding(ax, f"Different seeds out of {of}: {', '.join(different)} (dashed: used more than once)")
    return figure
