"""When is a checkpoint torn, onto which device is it loaded, and what does each part of the state weigh?

Read next: `overview.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddp_course.draw.charts import chart, name_axes, note
from ddp_course.draw.shapes import arrow, box, canvas, finding, label
from ddp_course.draw.style import ALARM, HEADING, INK, LABEL, LINE, MUTED, SHARED, SMALL, WIDTH, rank_colour

OLD, NEW = rank_colour(0), rank_colour(2)  # blue and green; what is torn has the colour of an alarm
OUTCOMES = {"old": ("the old checkpoint", OLD), "new": ("the new one", NEW), "torn": ("nothing: torn", ALARM)}
MARKS = {"old": "o", "new": "s", "torn": "X"}


def write_kills(plain: Sequence[tuple[float, str]], sealed: Sequence[tuple[float, str]]) -> Figure:
    """The life of a write twice, with a mark where each kill fell, in the shape of what could be loaded afterwards.

    Args:
        plain: for each kill of a `torch.save` to the final name, how many of its steps were done, and the outcome:
            "old", "new" or "torn". It has one step, so 0.25 is a quarter of the bytes.
        sealed: the same of a write to another name: the write, fsync, rename and fsync are its four steps.
    """
    figure, ax = canvas(4.1)
    shown = [outcome for outcome in OUTCOMES if any(outcome == found for _, found in [*plain, *sealed])]
    label(ax, 0.1, 3.86, "after the kill, the final name loads", align="left", ink=MUTED)
    for place, outcome in enumerate(shown):
        x = 3.1 + 1.75 * place
        ax.plot(x, 3.86, MARKS[outcome], color=OUTCOMES[outcome][1], markersize=8)
        label(ax, x + 0.15, 3.86, OUTCOMES[outcome][0], align="left")
    _life(ax, 2.15, "torch.save to the final name", [("write into last.pt", 1.0)], plain)
    steps = [("write into .last.pt.unfinished", 0.64), ("fsync", 0.12), ("rename", 0.12), ("fsync", 0.12)]
    _life(ax, 0.3, "to another name, then rename", steps, sealed)
    finding(ax, "A kill tears only the file that is being written")
    ax.says = f"torch.save to the final name: {_counted(plain)}. To another name, then rename: {_counted(sealed)}."
    return figure


def _counted(kills: Sequence[tuple[float, str]]) -> str:
    found = [outcome for _, outcome in kills]
    return f"{len(kills)} kills: " + ", ".join(f"{found.count(each)} {each}" for each in OUTCOMES if each in found)


def _life(
    ax: Axes, y: float, title: str, steps: Sequence[tuple[str, float]], kills: Sequence[tuple[float, str]]
) -> None:
    left, length = 0.15, WIDTH - 0.3
    label(ax, left, y + 1.2, title, bold=True, size=HEADING, align="left")
    label(ax, left + length, y + 1.2, _counted(kills), align="right")
    edges = [left]
    for place, (name, share) in enumerate(steps):
        box(
            ax, edges[-1] + 0.02, y, share * length - 0.04, 0.42, name, colour=OLD if place == 0 else SHARED, size=SMALL
        )
        edges.append(edges[-1] + share * length)
    for done, outcome in kills:
        step = min(int(done), len(steps) - 1)
        x = edges[step] + (done - step) * (edges[step + 1] - edges[step])
        ax.plot([x, x], [y + 0.43, y + 0.6], color=OUTCOMES[outcome][1], linewidth=0.8)
        ax.plot(x, y + 0.68, MARKS[outcome], color=OUTCOMES[outcome][1], markersize=8)


def landings(locations: Sequence[str], copy: str) -> Figure:
    """Which GPU takes the copy that each rank loads: by the name in the file, and each rank's own.

    Args:
        locations: by rank, the device that the file asks for when nothing else is said.
        copy: the size of one copy, as text.
    """
    figure, ax = canvas(3.1)
    world_size = len(locations)
    own = [f"cuda:{rank}" for rank in range(world_size)]
    panels = (("map_location=None", locations), ("map_location=own device", own))
    for side, (title, targets) in enumerate(panels):
        left, column = 0.1 + side * WIDTH / 2, (WIDTH / 2 - 0.2) / world_size
        label(ax, left + column * world_size / 2, 2.9, title, bold=True, mono=True)
        for rank in range(world_size):
            x = left + column * rank
            copies = sum(target == own[rank] for target in targets)
            box(ax, x + 0.05, 2.2, column - 0.1, 0.42, f"rank {rank}", colour=rank_colour(rank), size=SMALL)
            box(ax, x + 0.05, 0.2, column - 0.1, 1.05, colour=ALARM if copies > 1 else LINE, fill=copies > 0)
            label(ax, x + column / 2, 1.05, own[rank], size=SMALL, mono=True)
            label(ax, x + column / 2, 0.6, f"{copies} x\n{copy}" if copies else "no copy", size=SMALL, bold=copies > 1)
            target = own.index(targets[rank])
            end = left + column * (target + 0.5) + 0.12 * (rank - target)
            arrow(ax, (x + column / 2, 2.2), (end, 1.27), colour=rank_colour(rank))
    most = max(map(list(locations).count, own))
    finding(ax, f"Without map_location {most} copies land on one GPU; with it, one on each")
    return figure


def resume_differences(differences: Mapping[str, float]) -> Figure:
    """How far the weights of resumed runs are from those of the uninterrupted one.

    Args:
        differences: by what the resumed run did without, the largest difference in any weight.
    """
    figure, ax = chart(0.42 * len(differences) + 1.2)
    names, values = list(differences), list(differences.values())
    for y, value in enumerate(values):
        ax.plot((0, value), (y, y), color=ALARM if value else NEW, linewidth=9, solid_capstyle="butt")
        note(ax, value, y, f"{value:.2g}" if value else "0, every bit is the same")
    ax.set_xlim(0, 1.15 * max([*values, 1e-9]))
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", labelsize=LABEL, labelcolor=INK)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(visible=False, axis="y")
    ax.set_title("A resumed run is the same run only if no part of the state is missing", fontsize=LABEL, color=INK)
    name_axes(ax, "largest difference in a weight, compared with the run that never stopped")
    return figure
