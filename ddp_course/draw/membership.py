"""Who is who, how do the ranks find each other, and which of them talk together?

Read next: `training.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import cos, pi, sin
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from ddp_course.draw.shapes import arrow, box, canvas, finding, label
from ddp_course.draw.style import FAINT, LINE, MUTED, PAPER, SHARED, SMALL, WIDTH, rank_colour, tint


def rank_map(world_size: int, nodes: int) -> Figure:
    """Which rank sits on which GPU of which node, when every node has the same number of GPUs.

    Args:
        nodes: machines; must divide `world_size`.
    Raises:
        ValueError: `nodes` does not divide `world_size`.
    """
    if nodes < 1 or world_size % nodes:
        raise ValueError(f"{nodes} nodes cannot share {world_size} ranks evenly; choose a divisor")
    local_world_size = world_size // nodes
    figure, ax = canvas(2.35)
    node_width = (WIDTH - 0.2 - 0.2 * (nodes - 1)) / nodes
    cell = (node_width - 0.2) / local_world_size
    for rank in range(world_size):
        node, local_rank = divmod(rank, local_world_size)
        left = 0.1 + node * (node_width + 0.2)
        if local_rank == 0:
            box(ax, left, 0.1, node_width, 2.15, fill=False)
            label(ax, left + 0.15, 2.02, f"node {node}", bold=True, align="left")
        x = left + 0.1 + cell * local_rank + 0.05
        box(ax, x, 0.22, cell - 0.1, 1.58, colour=rank_colour(rank))
        middle = x + (cell - 0.1) / 2
        label(ax, middle, 1.5, f"rank {rank}", bold=True)
        label(ax, middle, 1.02, f"local\nrank {local_rank}", size=SMALL)
        label(ax, middle, 0.47, f"cuda:{local_rank}", size=SMALL - 1, mono=True, ink=MUTED)
    several = "Ranks count through the whole job; local ranks begin at 0 again on each node, as its GPUs do"
    finding(ax, several if nodes > 1 else "On one node, each rank is its own local rank")
    return figure


def rendezvous(world_size: int, store: str, keys: Sequence[str] = ()) -> Figure:
    """How ranks that know nothing of each other form a group: through a store first, then directly.

    Args:
        store: what they meet at, as the middle of the first panel names it.
        keys: entries found in the store, shown under the first panel.
    """
    figure, ax = canvas(3.6)
    first, second, third = WIDTH * 0.18, WIDTH * 0.5, WIDTH * 0.82
    label(ax, first, 3.2, "1. each rank writes its\naddress, reads the others'")
    _around_a_store(ax, (first, 1.62), world_size, store)
    label(ax, second, 3.2, "2. ranks connect directly,\npair by pair")
    pairs = combinations(range(world_size), 2)
    _connected(ax, (second, 1.62), world_size, pairs, colour=LINE, both_ways=True, dashed=True)
    label(ax, third, 3.2, "3. collectives flow\nfrom rank to rank")
    ring = [(rank, (rank + 1) % world_size) for rank in range(world_size)]
    _connected(ax, (third, 1.62), world_size, ring, colour=SHARED)
    if keys:
        label(ax, 0.15, 0.2, "in the store: " + ", ".join(keys), size=SMALL, ink=MUTED, align="left")
    finding(ax, "The store is only for meeting: collectives go from rank to rank")
    return figure


def _around_a_store(ax: Axes, middle: tuple[float, float], world_size: int, store: str) -> None:
    """The ranks in a circle, each with an arrow to and from the store in the middle."""
    spots = _circle(middle, world_size)
    for rank, spot in enumerate(spots):
        ends = _towards(spot, middle, 0.24), _towards(middle, spot, 0.42)
        arrow(ax, *ends, colour=rank_colour(rank), both_ways=True)
    box(ax, middle[0] - 0.42, middle[1] - 0.2, 0.84, 0.4, store, size=SMALL)
    _rank_dots(ax, spots)


def _connected(
    ax: Axes, middle: tuple[float, float], world_size: int, pairs: Iterable[tuple[int, int]], **style: Any
) -> None:
    """The ranks in a circle, with an arrow for each pair."""
    spots = _circle(middle, world_size)
    for one, two in pairs:
        arrow(ax, _towards(spots[one], spots[two], 0.24), _towards(spots[two], spots[one], 0.24), **style)
    _rank_dots(ax, spots)


def subgroups(groups: Mapping[str, Sequence[int]], world_size: int, title: str = "") -> Figure:
    """One line per group: a filled dot for each member, an empty one for each rank outside.

    Raises:
        ValueError: a group names a rank that does not exist.
    """
    for name, members in groups.items():
        if not set(members) <= set(range(world_size)):
            raise ValueError(f"group {name!r}: ranks {list(members)} are not all in 0 to {world_size - 1}")
    row, left = 0.5, 2.1
    height = row * len(groups) + 0.6
    figure, ax = canvas(height)
    column = (WIDTH - left - 0.2) / world_size
    for rank in range(world_size):
        label(ax, left + column * (rank + 0.5), height - 0.25, f"rank {rank}", bold=True)
    for place, (name, members) in enumerate(groups.items()):
        y = height - 0.75 - row * place
        centres = {rank: left + column * (rank + 0.5) for rank in range(world_size)}
        label(ax, 0.15, y, name, align="left")
        inside = [centres[rank] for rank in members]
        ax.plot((min(inside), max(inside)), (y, y), color=SHARED, linewidth=2.5, zorder=1)
        for rank, x in centres.items():
            edge = rank_colour(rank) if rank in members else FAINT
            face = edge if rank in members else PAPER
            ax.add_patch(Circle((x, y), 0.15, facecolor=face, edgecolor=edge, linewidth=1.4, zorder=2))
    finding(ax, title or "Each line is a group; its filled dots are the members")
    ax.says = " ".join(f"{name}: {', '.join(map(str, members))}." for name, members in groups.items())
    return figure


def _circle(middle: tuple[float, float], world_size: int, radius: float = 0.98) -> list[tuple[float, float]]:
    start = {2: pi, 4: 0.75 * pi}.get(world_size, pi / 2)  # two ranks lie side by side, four in a square
    angles = [start - 2 * pi * rank / world_size for rank in range(world_size)]
    return [(middle[0] + radius * cos(angle), middle[1] + radius * sin(angle)) for angle in angles]


def _towards(start: tuple[float, float], end: tuple[float, float], gap: float) -> tuple[float, float]:
    length = ((end[0] - start[0]) ** 2 + (end[1] - start[1]) ** 2) ** 0.5
    return start[0] + (end[0] - start[0]) * gap / length, start[1] + (end[1] - start[1]) * gap / length


def _rank_dots(ax: Axes, spots: Sequence[tuple[float, float]]) -> None:
    for rank, (x, y) in enumerate(spots):
        colour = rank_colour(rank)
        ax.add_patch(Circle((x, y), 0.22, facecolor=tint(colour), edgecolor=colour, linewidth=1.4, zorder=2))
        label(ax, x, y, str(rank), bold=True)
