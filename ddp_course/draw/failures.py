"""Who waits for whom in a hang, who comes late, and which question leads from a symptom to its cause?

Read next: `overview.py`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddp_course.draw.charts import chart, legend_beside, name_axes
from ddp_course.draw.shapes import arrow, box, canvas, finding, label
from ddp_course.draw.style import ALARM, FAINT, HEADING, INK, MUTED, SHARED, SMALL, WIDTH, rank_colour
from ddp_course.launcher.rank_status import Whereabouts

MOST_COLUMNS = 5  # collectives that fit beside each other
LAST_WIDTH = 3.3  # inches, for the one that is waited in
LETTERS = 62  # of a line of names on the ladder

# A symptom, where to look, and the faults that are behind it. Asked from top to bottom; the first yes decides.
LADDER: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Did the ranks fail to meet?",
        "each rank's first words",
        ("rendezvous-unreachable", "port-taken", "world-size-mismatch", "function-from-main", "local-rank-argument"),
    ),
    (
        "Does it fail only after loading a checkpoint?",  # before raising and numbers, to which its symptoms lead too
        "who wrote it; names and devices",
        ("several-writers", "all-on-gpu-0", "module-prefix"),
    ),
    (
        "Did a rank raise or die?",
        "the rank that failed first, by itself",
        ("one-rank-raises", "unused-parameters", "marked-ready-twice", "collective-shape", "nccl-in-docker"),
    ),
    (
        "Does it hang?",
        "who is in which collective",
        (
            "skipped-collective",
            "collective-order",
            "rank0-only-validation",
            "rank0-only-save",
            "uneven-inputs",
            "forked-cuda",
        ),
    ),
    (
        "Is it slower than it should be?",
        "who comes last; threads and rows",
        ("straggler", "too-many-threads", "missing-sampler", "iterable-duplicates"),
    ),
    (
        "Do the numbers differ from one process's?",
        "rows, sums, statistics",
        (
            *("missing-set-epoch", "padded-evaluation", "mean-of-means", "batchnorm-drift", "lr-not-scaled"),
            *("same-augmentation", "all-gather-gradient", "padded-accumulation"),
        ),
    ),
)


def ladder(questions: Sequence[tuple[str, str, Sequence[str]]] = LADDER) -> Figure:
    """Questions from top to bottom; a yes leads to the right, to the faults that fit, a no down to the next.

    Args:
        questions: each a question, where to look, and the names of faults.
    """
    rungs = [(question, look, _lines(names)) for question, look, names in questions]
    heights = [0.62 + 0.19 * len(lines) for *_, lines in rungs]
    gap, left, right = 0.2, 0.1, 3.1
    y = sum(heights) + gap * len(heights) + 0.2
    figure, ax = canvas(y + 0.1)
    finding(ax, "The first yes says where to look")
    for place, ((question, look, lines), height) in enumerate(zip(rungs, heights, strict=True)):
        y -= height
        middle = y + height / 2
        box(ax, left, middle - 0.27, 2.45, 0.54, textwrap.fill(question, 24), bold=True)
        arrow(ax, (left + 2.45, middle), (right, middle))
        label(ax, (left + 2.45 + right) / 2, middle + 0.13, "yes", size=SMALL, ink=MUTED)
        box(ax, right, y, WIDTH - right - 0.1, height, fill=False)
        label(ax, right + 0.12, y + height - 0.2, f"look at: {look}", align="left", bold=True, size=SMALL)
        label(ax, right + 0.12, y + (height - 0.34) / 2, "\n".join(lines), align="left", size=SMALL)
        more = place + 1 < len(rungs)
        below = y - gap - heights[place + 1] / 2 + 0.27 if more else y - gap
        arrow(ax, (left + 1.2, middle - 0.27), (left + 1.2, below))
        no, at = ("no", (middle - 0.27 + below) / 2) if more else ("no: look at one process", below)
        label(ax, left + 1.33, at, no, size=SMALL, ink=MUTED, align="left")
        y -= gap
    return figure


def _lines(names: Sequence[str]) -> list[str]:
    return textwrap.wrap(", ".join(names), LETTERS, break_on_hyphens=False)


def hang(ranks: Sequence[Whereabouts], timeout_s: float, steps: Sequence[Sequence[int]] = ()) -> Figure:
    """The last collectives that each rank entered, from left to right, and who waits in the last one for whom.

    Args:
        ranks: of a `RankError`; only collectives of the default group are drawn.
        timeout_s: how long the ranks waited, in seconds.
        steps: by rank, in which step of the program each of its collectives was called, if that is known.
    """
    figure, ax = canvas(0.72 * len(ranks) + 0.75)
    calls = [[call for call in w.recent if not call.group] for w in ranks]
    numbers = sorted({call.number for of_rank in calls for call in of_rank})[-MOST_COLUMNS:] or [1]
    left, top = 0.85, 0.72 * len(ranks) + 0.1
    column = min(1.3, (WIDTH - left - LAST_WIDTH) / max(1, len(numbers) - 1))
    label(ax, left, top + 0.38, "collectives, in the order in which a rank enters them", align="left", ink=MUTED)
    for w, of_rank in zip(ranks, calls, strict=True):
        y = top - 0.72 * (w.rank + 1) + 0.2
        label(ax, 0.1, y + 0.21, f"rank {w.rank}", align="left", bold=True, size=HEADING)
        entered = {call.number: call for call in of_rank}
        for place, number in enumerate(numbers):
            x = left + column * place
            if call := entered.get(number):
                last = number == numbers[-1]
                stuck = last and not _everybody_left(calls, number)
                width = WIDTH - x - 0.1 if stuck else column - 0.06
                words = f"{call.op} #{number}: waits {timeout_s:g} s" if stuck else _short(call.op, number, column)
                words += f"\nin step {steps[w.rank][number - 1]}" if steps else ""
                box(ax, x, y, width, 0.42, words, colour=rank_colour(w.rank), dashed=stuck, size=SMALL)
        if numbers[-1] not in entered:
            _absent(ax, left + column * (len(numbers) - 1), y, w)
    return figure


def _everybody_left(calls: Sequence[Sequence], number: int) -> bool:
    return all(any(call.number == number and call.finished for call in of_rank) for of_rank in calls)


def _short(op: str, number: int, column: float) -> str:
    """As much of a name as fits a column."""
    return f"{op} #{number}" if column > 1.2 else f"#{number}"


def _absent(ax: Axes, x: float, y: float, w: Whereabouts) -> None:
    if w.status == "returned":
        words = "never came: had returned"
    else:
        source = w.line.source if w.line else w.status
        words = f"never came: {textwrap.shorten(source, 28, placeholder=' ...')}"
    box(ax, x, y, WIDTH - x - 0.1, 0.42, words, colour=ALARM, fill=False, size=SMALL, ink=ALARM)


def lateness(arrivals: Sequence[Sequence[float]]) -> Figure:
    """How long after the first rank each rank came to each collective.

    Args:
        arrivals: for each collective, when each rank entered it, by rank, in seconds on one clock.
    """
    figure, ax = chart(2.6)
    for rank in range(len(arrivals[0])):
        late_ms = [1e3 * (came[rank] - min(came)) for came in arrivals]
        colour = rank_colour(rank)
        ax.plot(range(1, len(late_ms) + 1), late_ms, color=colour, marker="o", linewidth=1.5, label=f"rank {rank}")
    ax.axhline(0, color=FAINT, linewidth=1)
    name_axes(ax, "collective", "ms after the first rank")
    ax.set_xticks(range(1, len(arrivals) + 1))
    legend_beside(ax, labelcolor=INK)
    ax.tick_params(colors=SHARED)
    return figure
