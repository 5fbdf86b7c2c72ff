"""When did each rank compute, and when did its all-reduces run?

One block for each rank. Its first row is the model's work: forward, backward, optimizer, and the time in which it
only waits. Below are its all-reduces, as long as they took, in the order of their start. A dashed line stands where
the rank's last gradient was ready: what is to the left of it overlaps with backward, what is to the right is exposed.

Read next: `scaling/spans.py`, what a span is.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ddp_course.draw.buckets import size_text
from ddp_course.draw.clock import STRENGTH, bar, beside, clock, legend_below, shade
from ddp_course.draw.shapes import label
from ddp_course.draw.style import INK, LABEL, LINE, PAPER, SHARED, SMALL, rank_colour, tint
from ddp_course.scaling.spans import TALKING, Span, joined, merge_ranks, rows_of

ROW_INCHES = 0.27
MOST_ROWS = 18  # of labelled all-reduces, all ranks together; more are packed, without labels
LEAST_PACKED = 3  # rows for those; gloo's two threads need two
BAR = 0.74  # of a row's height
LETTER_INCHES = 0.078  # the width of a letter of the small size, generously


def timeline(spans_by_rank: Sequence[Sequence[Span]], title: str = "") -> Figure:
    """One step of every rank on one clock.

    Args:
        spans_by_rank: as `record_trace` returned them.
    Raises:
        ValueError: there is no span.
    """
    ranks = merge_ranks(spans_by_rank)
    if not any(ranks):
        raise ValueError("no spans to draw; record them with record_trace")
    longest_ms = 1000 * max(span.end_s for spans in ranks for span in spans)
    ms_per_letter = longest_ms * LETTER_INCHES / 5.6  # about 5.6 inches are left for the bars
    blocks = [_rows(spans, MOST_ROWS // len(ranks)) for spans in ranks]
    inches = ROW_INCHES * sum(len(rows) + 1.5 for rows, _ in blocks)
    figure, ax = clock(inches, left=1.15, above=0.3)
    top, right = 0.0, longest_ms
    for rank, (spans, (rows, labelled)) in enumerate(zip(ranks, blocks, strict=True)):
        right = max(right, _block(ax, rank, spans, rows, top, ms_per_letter if labelled else None))
        top += len(rows) + 1.5
    ax.set(xlim=(0, right * 1.01), ylim=(top - 0.4, -0.2), yticks=[], title=title)
    ax.title.set(fontsize=LABEL, color=INK)
    _legend(ax, inches, {span.lane for spans in ranks for span in spans}, len(ranks))
    ax.says = " ".join(f"Rank {rank}: {_says(spans)}" for rank, spans in enumerate(ranks))
    return figure


def _says(spans: Sequence[Span]) -> str:
    """What overlaps with what on one rank."""
    starts = [span.start_s for span in spans if span.lane == "all-reduce"]
    backward = [span for span in spans if span.lane == "backward"]
    if not backward:
        return f"{len(starts)} all-reduces."
    ready, last = max(span.end_s for span in backward), max(span.end_s for span in spans)
    begun = sum(start < ready for start in starts)
    return (
        f"backward runs from {1000 * min(span.start_s for span in backward):.0f} to {1000 * ready:.0f} ms; "
        f"{begun} of {len(starts)} all-reduces start before its end; the last bar ends at {1000 * last:.0f} ms."
    )


def _rows(spans: Sequence[Span], most: int) -> tuple[list[list[Span]], bool]:
    """The rows of one rank's collectives, and whether they are labelled: one a row, if there are not too many.

    How many rows there are must depend on the number of collectives, not on when they happened to run.
    """
    talk = [span for span in spans if span.lane in TALKING]
    if len(talk) <= most:
        return [[span] for span in talk], True
    rows = rows_of(talk)
    return rows + [[]] * (LEAST_PACKED - len(rows)), False


def _note(number: int, span: Span) -> str:
    name = str(number) if span.lane == "all-reduce" else span.name
    return name if span.bytes is None else f"{name}: {size_text(span.bytes)}"


def _block(
    ax: Axes, rank: int, spans: Sequence[Span], rows: list[list[Span]], top: float, ms_per_letter: float | None
) -> float:
    """Draw one rank and return where its last label ends, in milliseconds."""
    beside(ax, top + 0.5, f"rank {rank}", bold=True)
    for span in joined(span for span in spans if span.lane not in TALKING):
        bar(ax, span, top, BAR, linewidth=0.9, **_look(span, rank))
    talk = sorted((s for row in rows for s in row), key=lambda s: s.start_s)
    numbers = {id(s): n for n, s in enumerate(s for s in talk if s.lane == "all-reduce")}
    ready = max((s.end_s * 1000 for s in spans if s.lane == "backward"), default=None)
    right = 0.0
    for place, row in enumerate(rows):
        for span in row:
            bar(ax, span, top + 1 + place, BAR, linewidth=0.9, facecolor=tint(SHARED, 0.55), edgecolor=SHARED)
            if ms_per_letter:
                note = _note(numbers.get(id(span), 0), span)
                x, align = _beside_bar(span, ms_per_letter, len(note), ready)
                placed = label(ax, x, top + 1.5 + place, note, size=SMALL - 1, align=align)
                placed.set_bbox({"facecolor": PAPER, "edgecolor": "none", "pad": 0.5})  # above the grid
                right = max(right, x + ms_per_letter * len(note) * (align == "left"))
    if rows:
        beside(ax, top + 1.5, "all-reduce" if len(talk) == 1 else f"{len(talk)} all-reduces")
    if ready is not None:
        ax.plot([ready, ready], [top, top + 1 + len(rows)], color=INK, linewidth=1.1, linestyle="--", zorder=4)
    return right


def _beside_bar(span: Span, ms_per_letter: float, letters: int, ready: float | None) -> tuple[float, str]:
    """Where a bar's label stands: to its right, or to its left where it would meet the dashed line on the right."""
    start, end = 1000 * span.start_s - ms_per_letter, 1000 * span.end_s + ms_per_letter
    width = ms_per_letter * letters
    meets = ready is not None and 1000 * span.end_s <= ready <= end + width
    return (start, "right") if meets and start >= width else (end, "left")


def _look(span: Span, rank: int) -> dict:
    if span.lane == "waiting":
        return {"facecolor": PAPER, "edgecolor": LINE, "linestyle": ":"}
    return {"facecolor": tint(rank_colour(rank), STRENGTH[span.lane]), "edgecolor": "none"}


def _legend(ax: Axes, inches: float, lanes: set[str], world_size: int) -> None:
    """Only what the picture has."""
    marks: dict = {lane: tuple(shade(lane, rank) for rank in range(world_size)) for lane in STRENGTH}
    marks["waiting"] = Patch(facecolor=PAPER, edgecolor=LINE, linestyle=":", label="waits")
    marks["all-reduce"] = Patch(facecolor=tint(SHARED, 0.55), edgecolor=SHARED, label="all-reduce")
    handles = [mark for lane, mark in marks.items() if lane in lanes]
    if "backward" in lanes:
        handles.append(Line2D([], [], color=INK, linestyle="--", linewidth=1.1, label="last gradient ready"))
    legend_below(ax, handles, 0.43, inches)
