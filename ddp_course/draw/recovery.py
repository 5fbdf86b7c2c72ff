"""What does a killed run lose, how often should it save, and who starts it again?

Read next: `overview.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddp_course.draw.charts import chart, headline, legend, name_axes, note
from ddp_course.draw.shapes import arrow, box, canvas, finding, label
from ddp_course.draw.style import ALARM, FAINT, HEADING, INK, MUTED, RANK_COLOURS, SHARED, SMALL, WIDTH, rank_colour

DONE, AGAIN = RANK_COLOURS[0], RANK_COLOURS[2]  # steps that count; steps of the resumed run
LEFT = 1.5  # inches for the names of the rows
ENDS = {"killed": ("X", ALARM), "left": ("s", SHARED)}


def killed_run(steps: int, attempts: Sequence[tuple[int, int, str]], saves: Sequence[int]) -> Figure:
    """A run that stopped and went on, beside the run that never stopped; the axis counts steps, not seconds.

    Args:
        attempts: for each round, its first step, its last, and how it ended: "killed", "left" or "done".
        saves: the steps whose checkpoints one of the attempts went on from, or could have.
    """
    rows, twice = len(attempts) + 1, 0
    figure, ax = canvas(0.75 * rows + 0.95)
    scale = (WIDTH - LEFT - 0.45) / steps
    tops = [0.75 * (rows - 1 - row) + 0.6 for row in range(rows)]
    label(ax, 0.1, tops[0] + 0.2, "never stopped", align="left", bold=True)
    _stretch(ax, 0, steps, tops[0], scale, DONE)
    for number, ((first, last, end), y) in enumerate(zip(attempts, tops[1:], strict=True)):
        label(ax, 0.1, y + 0.2, f"round {number + 1}", align="left", bold=True)
        kept = attempts[number + 1][0] if number + 1 < len(attempts) else last
        _stretch(ax, first, min(kept, last), y, scale, AGAIN if number else DONE)
        if kept < last:
            twice += last - kept
            _stretch(ax, kept, last, y, scale, ALARM, dashed=True)
        if end in ENDS:
            mark, colour = ENDS[end]
            ax.plot(LEFT + last * scale + 0.12, y + 0.2, mark, color=colour, markersize=9, zorder=6)
        if number + 1 < len(attempts):
            x = LEFT + kept * scale
            arrow(ax, (x, y - 0.02), (x, tops[number + 2] + 0.46), colour=SHARED)
        for save in saves:
            if first < save <= last:
                ax.plot(LEFT + save * scale, y + 0.52, "v", color=SHARED, markersize=6)
    _killed_legend(ax, tops[0] + 0.72, any(end == "left" for *_, end in attempts))
    label(ax, LEFT, 0.25, "step 0", size=SMALL, ink=MUTED, align="left")
    label(ax, LEFT + steps * scale, 0.25, f"step {steps}", size=SMALL, ink=MUTED, align="right")
    finding(ax, f"{len(attempts)} rounds for {steps} steps: {twice} steps are done twice, and nothing else is lost")
    return figure


def _stretch(ax: Axes, first: int, last: int, y: float, scale: float, colour: str, dashed: bool = False) -> None:
    width = (last - first) * scale
    if width > 0.02:
        texts = (f"{last - first} steps", f"{last - first}", "")
        text = next(one for one in texts if width > 0.1 * len(one) + 0.1 or not one)
        box(ax, LEFT + first * scale, y, width, 0.4, text, colour=colour, dashed=dashed, size=SMALL)


def _killed_legend(ax: Axes, y: float, left: bool) -> None:
    marks = [("v", SHARED, "saved"), ("X", ALARM, "killed")] + [("s", SHARED, "left, saved")] * left
    for place, (mark, colour, text) in enumerate(marks):
        x = LEFT + 0.1 + 1.35 * place
        ax.plot(x, y, mark, color=colour, markersize=8)
        label(ax, x + 0.15, y, text, size=SMALL, align="left")
    x = LEFT + 0.1 + 1.35 * len(marks)
    box(ax, x - 0.08, y - 0.09, 0.26, 0.18, colour=ALARM, dashed=True)
    label(ax, x + 0.28, y, "steps done twice", size=SMALL, align="left")


def sigterm(received: tuple[int, int], own: Sequence[int | None], common: Sequence[int | None]) -> Figure:
    """The ranks before and after the step in which one receives SIGTERM: by its own flag, and by the largest of all.

    Args:
        received: the rank that is told, and its step.
        own, common: for each rank the step after which it leaves, None where it waits for the others.
    """
    figure, ax = canvas(1.3 + 1.1 * len(own) + 0.3)
    top = 1.45 + 1.1 * len(own)
    for name, left, shared in (("each rank: its own flag", own, False), ("all_reduce(MAX) of the flags", common, True)):
        label(ax, 0.1, top, name, align="left", bold=True)
        for rank, last in enumerate(left):
            _told(ax, top - 0.68 - 0.55 * rank, rank, received, last, shared)
        for number in range(received[1] - 1, max((last or 0) for last in left) + 1) if shared else ():
            x, height = 2.24 + 1.85 * (number - received[1] + 1), 0.55 * len(left) - 0.1
            box(ax, x, top - 0.13 - 0.55 * len(left), 0.43, height, f"MAX\n{int(number >= received[1])}", size=SMALL)
        top -= 0.75 + 0.55 * len(own)
    ends = sorted({str(last) for last in common})
    finding(ax, f"By the largest flag all ranks leave after the same step: {', '.join(ends)}")
    return figure


def _told(ax: Axes, y: float, rank: int, received: tuple[int, int], last: int | None, shared: bool) -> None:
    """One rank's steps; beside each its own flag, if the flags are not `shared`."""
    victim, step = received
    label(ax, 0.1, y + 0.22, f"rank {rank}", align="left")
    for place, number in enumerate(range(step - 1, step + 2)):
        x, hit = 0.95 + 1.85 * place, (rank, number) == received
        if last is not None and number > last:
            label(ax, x, y + 0.22, "has left", size=SMALL, align="left", ink=MUTED)
            break
        if last is None and number > step:
            box(ax, x, y, 1.9, 0.45, f"waits in step {number}", colour=ALARM, dashed=True, size=SMALL)
            break
        text = f"step {number}" + "\nSIGTERM" * hit
        box(ax, x, y, 1.15, 0.45, text, colour=ALARM if hit else rank_colour(rank), size=SMALL)
        if not shared:
            box(ax, x + 1.25, y, 0.5, 0.45, f"flag {int(rank == victim and number >= step)}", size=SMALL)


def lost_time(intervals: Sequence[float], saving: Sequence[float], repeating: Sequence[float], best: float) -> Figure:
    """The time lost, as a share of training, against the minutes between two saves, both on logarithmic axes.

    Args:
        intervals: minutes between two saves.
        saving, repeating: what is lost at each of them, by saving, and by failures (work done again, restarts).
        best: the interval by Young's formula.
    """
    figure, ax = chart(3.4)
    total = [a + b for a, b in zip(saving, repeating, strict=True)]
    ax.plot(intervals, saving, color=RANK_COLOURS[1], linewidth=1.6, linestyle="--", label="by saving")
    ax.plot(intervals, repeating, color=RANK_COLOURS[3], linewidth=1.6, linestyle=":", label="by failures")
    ax.plot(intervals, total, color=DONE, linewidth=2.2, label="both")
    ax.set(xscale="log", yscale="log")
    ax.yaxis.set_major_formatter("{x:.0%}")
    ax.set_ylim(min(total) / 4, max(total) * 2)
    ax.axvline(best, color=SHARED, linewidth=1)
    note(ax, best, max(total) * 1.3, f"Young: {best:.1f} min")
    name_axes(ax, "minutes between two saves", "time lost / time of training")
    legend(ax, loc="lower left")
    headline(ax, f"Least is lost, {min(total):.1%} by both, at about {best:.0f} minutes between two saves")
    return figure


def agents(nodes: int = 2, ranks_per_node: int = 2, dead: int | None = None) -> Figure:
    """The nodes of an elastic job: on each an agent and its ranks; the agents meet at one store, which is on node 0.

    A node that is `dead` has the colour of an alarm, and the ranks of the others are numbered without it.

    Raises:
        ValueError: node 0 is `dead`; with its store the whole job ends.
    """
    if dead == 0:
        raise ValueError("node 0 has the store: if it dies, no round follows")
    figure, ax = canvas(3.75)
    width = (WIDTH - 0.2) / nodes
    store_end = 0.1 + width / 2 + 1.05  # the right end of the store, which is over the agent of node 0
    first_rank = 0
    for node in range(nodes):
        x, alive = 0.1 + node * width, node != dead
        base = first_rank if alive else node * ranks_per_node
        colour = SHARED if alive else ALARM
        box(ax, x + 0.05, 0.1, width - 0.1, 3.55, colour=FAINT if alive else ALARM, fill=not alive, dashed=not alive)
        title = f"node {node}" if alive else f"node {node}: gone"
        label(ax, x + 0.2, 3.43, title, bold=True, size=HEADING, align="left", ink=INK if alive else ALARM)
        middle = x + width / 2
        box(ax, middle - 1.05, 1.5, 2.1, 0.5, "agent (torchrun)", colour=colour, dashed=not alive)
        if node == 0:
            box(ax, middle - 1.05, 2.6, 2.1, 0.6, "store, at the address\n--rdzv-endpoint", bold=True, size=SMALL)
        if alive:
            end = (middle, 2.58) if node == 0 else (store_end + 0.03, 3.0 - 0.2 * min(node, 2))
            arrow(ax, (middle, 2.02), end, colour=SHARED, both_ways=True)
        for local in range(ranks_per_node):
            _rank(ax, x, width, local, ranks_per_node, base + local, alive)
        first_rank += ranks_per_node if alive else 0
    if dead is None:
        finding(ax, "The agents meet at one store, and each starts and watches its node's ranks")
    else:
        finding(ax, f"Node {dead} is gone: the others begin a round with {first_rank} ranks")
    return figure


def _rank(ax: Axes, x: float, width: float, local: int, count: int, rank: int, alive: bool) -> None:
    column = (width - 0.4) / count
    left, middle = x + 0.2 + local * column, x + width / 2
    colour = rank_colour(rank) if alive else ALARM
    text = f"RANK {rank}\nLOCAL_RANK {local}" if alive else f"was RANK {rank}"
    box(ax, left + 0.05, 0.3, column - 0.1, 0.7, text, colour=colour, size=SMALL, dashed=not alive)
    if alive:
        arrow(ax, (middle + 0.4 * (local - (count - 1) / 2), 1.48), (left + column / 2, 1.02), colour=colour)
