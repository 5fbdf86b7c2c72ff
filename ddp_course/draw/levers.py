"""What does each lever of scaling do to a step?

Every picture is of a simulated link, and says so.

Read next: `scaling/simulate.py`, where the steps come from.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ddp_course.draw.clock import STRENGTH, bar, beside, clock, legend_below, shade
from ddp_course.draw.shapes import label
from ddp_course.draw.style import ALARM, INK, LABEL, PAPER, SHARED, SMALL, rank_colour, tint
from ddp_course.scaling.spans import COMPUTING, TALKING, Span, merge_ranks, talking_seconds, union

ROW_INCHES = 0.3
PANEL = 3.1  # rows from one step to the next: its name, the model, the link, and air
BAR = 0.78
LEFT = 0.75  # inches for the names of the rows


def lever(steps: Sequence[tuple[str, Sequence[Span]]], title: str = "") -> Figure:
    """Steps of one rank, one above the other on one clock: the model's work, and below it what the link carries.

    What the link carries while the model computes is pale, what the model has to wait for is drawn in the colour of
    an alarm. A line at the end of each step says how long it took.

    Args:
        steps: a name, and the spans of one step; first the one before the lever.
        title: which lever it is; " (simulated link)" is added.
    Raises:
        ValueError: a step has no spans.
    """
    if empty := [name for name, spans in steps if not spans]:
        raise ValueError(f"the step {empty[0]!r} has no spans to draw")
    drawn = [(name, merge_ranks([spans])[0]) for name, spans in steps]
    longest_ms = max(span.end_s for _, spans in drawn for span in spans) * 1000
    inches = ROW_INCHES * PANEL * len(drawn)
    figure, ax = clock(inches, LEFT, above=0.32)
    for place, (name, spans) in enumerate(drawn):
        _step(ax, place * PANEL, name, spans, longest_ms)
    ax.set(xlim=(0, longest_ms * 1.12), ylim=(PANEL * len(drawn) - 0.05, 0), yticks=[])
    ax.set_title(f"{title} (simulated link)".strip(), fontsize=LABEL, color=INK)
    waits_s = [sum(end - start for start, end in exposed(spans)) for _, spans in drawn]
    hides = any(talking_seconds(spans) > wait_s + 1e-9 for (_, spans), wait_s in zip(drawn, waits_s, strict=True))
    _step_legend(ax, inches, {span.lane for _, spans in drawn for span in spans}, hides)
    ax.says = " ".join(
        f"{name}: {_digits(1000 * max(span.end_s for span in spans))} ms, {_digits(1000 * wait_s)} of them exposed."
        for (name, spans), wait_s in zip(drawn, waits_s, strict=True)
    )
    return figure


def _step(ax: Axes, top: float, name: str, spans: Sequence[Span], longest_ms: float) -> None:
    """One panel: the name, the model's row, the link's row, and the end of the step."""
    label(ax, 0, top + 0.55, name, size=SMALL, bold=True, align="left")
    beside(ax, top + 1.45, "model")
    beside(ax, top + 2.45, "link")
    for span in spans:
        if span.lane in COMPUTING:
            _bar(ax, span, top + 1, tint(rank_colour(0), STRENGTH[span.lane]), PAPER)
        elif span.lane in TALKING:
            _bar(ax, span, top + 2, tint(SHARED, 0.35), PAPER)
    for start, end in exposed(spans):
        _bar(ax, Span("", start, end, "all-reduce"), top + 2, tint(ALARM, 0.75), "none")
    for span in spans:  # the outlines last: where one collective ends and the next begins
        if span.lane in TALKING:
            _bar(ax, span, top + 2, "none", SHARED)
    end = max(span.end_s for span in spans) * 1000
    ax.plot([end, end], [top + 0.95, top + 2.9], color=INK, linewidth=1.1, zorder=4)
    label(ax, end + 0.008 * longest_ms, top + 1.45, f"{_digits(end)} ms", size=SMALL, align="left")


def exposed(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """The stretches in which one rank's collectives run and its model computes nothing, in order."""
    left = []
    busy = union(span for span in spans if span.lane in COMPUTING)
    for start, end in union(span for span in spans if span.lane in TALKING):
        for begun, done in busy:
            if done <= start or begun >= end:
                continue
            if begun > start:
                left.append((start, begun))
            start = max(start, done)
        if start < end:
            left.append((start, end))
    return left


def _bar(ax: Axes, span: Span, row: float, face: str | tuple[float, ...], edge: str) -> None:
    bar(ax, span, row, BAR, linewidth=0.7, facecolor=face, edgecolor=edge)


def _step_legend(ax: Axes, inches: float, lanes: set[str], hides: bool) -> None:
    # Few words: text is most of a picture's bytes, and a lesson has many of these.
    hidden = [Patch(facecolor=tint(SHARED, 0.35), edgecolor=SHARED, label="all-reduce: overlapped")] * hides
    waited_for = Patch(
        facecolor=tint(ALARM, 0.75), edgecolor=SHARED, label="exposed" if hides else "all-reduce: exposed"
    )
    legend_below(ax, [*(shade(lane) for lane in STRENGTH if lane in lanes), *hidden, waited_for], 0.42, inches)


def _digits(value: float) -> str:
    """Three digits, or all of them in front of the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
