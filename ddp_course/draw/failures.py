"""Who waits for whom in a hang, and who comes late?

Read next: `overview.py`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddp_course.draw.shapes import box, canvas, label
from ddp_course.draw.style import ALARM, HEADING, MUTED, SMALL, WIDTH, rank_colour
from ddp_course.launcher.rank_status import Whereabouts

MOST_COLUMNS = 5  # collectives that fit beside each other
LAST_WIDTH = 3.3  # inches, for the one that is waited in


def hang(ranks: Sequence[Whereabouts], timeout_s: float, steps: Sequence[Sequence[int | str]] = ()) -> Figure:
    """The last collectives that each rank entered, from left to right, and who waits in the last one for whom.

    Args:
        ranks: of a `RankError`; only collectives of the default group are drawn.
        timeout_s: how long the ranks waited, in seconds.
        steps: by rank, in which step of the program each of its collectives was called, or other words for it.
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
                if steps:
                    step = steps[w.rank][number - 1]
                    words += f"\n{step}" if isinstance(step, str) else f"\nin step {step}"
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
