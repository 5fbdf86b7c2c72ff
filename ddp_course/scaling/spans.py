"""How much of a step is computing, how much is talking, and how much of the talking is hidden?

A `Span` is something that one rank did from one moment to another, in one lane: forward, backward, all-reduce and
so on. Spans are plain numbers, so all that is asked of them is arithmetic on intervals. `exposed_seconds` is what
communication costs: the time in which a rank's collectives run and its model does not.

Read next: `simulate.py`, which makes them; `draw/timelines.py`, the picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

LANES = ("forward", "backward", "waiting", "optimizer", "all-reduce", "other collective")
COMPUTING = ("forward", "backward", "optimizer")
TALKING = ("all-reduce", "other collective")


@dataclass(frozen=True)
class Span:
    """Something that one rank did from `start_s` to `end_s`."""

    name: str
    start_s: float  # on a clock that all ranks share
    end_s: float
    lane: str  # one of LANES
    bytes: int | None = None  # payload of a collective, if the records tell
    line: str = ""  # of the program, that called the collective, if that is known


# --- Arithmetic on spans ---------------------------------------------------------------------------


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The stretches of time covered by at least one span, in order, none touching the next."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start_s, span.end_s) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def busy_seconds(spans: Iterable[Span], lanes: Sequence[str]) -> float:
    """How long at least one span of these lanes was under way; what runs at the same time counts once."""
    return sum(end - start for start, end in union(span for span in spans if span.lane in lanes))


def talking_seconds(spans: Iterable[Span]) -> float:
    """How long one rank had collectives under way, peers that it waited for included."""
    return busy_seconds(spans, TALKING)


def exposed_seconds(spans: Sequence[Span]) -> float:
    """How long one rank's collectives ran while its own model computed nothing: what communication costs."""
    return busy_seconds(spans, COMPUTING + TALKING) - busy_seconds(spans, COMPUTING)


def rows_of(spans: Sequence[Span], extra_s: Sequence[float] | None = None) -> list[list[Span]]:
    """Put spans into as few rows as needed so that those in a row do not overlap; earliest first.

    Args:
        extra_s: room to leave behind each span, for a label say.
    """
    rows: list[list[Span]] = []
    free_s: list[float] = []
    for index, span in sorted(enumerate(spans), key=lambda item: item[1].start_s):
        end = span.end_s + (extra_s[index] if extra_s else 0.0)
        row = next((row for row, free in enumerate(free_s) if free <= span.start_s), len(rows))
        if row == len(rows):
            rows.append([])
            free_s.append(0.0)
        rows[row].append(span)
        free_s[row] = end
    return rows


def joined(spans: Iterable[Span]) -> list[Span]:
    """Make one span of those of a lane that follow each other: of the nodes of a backward pass, hooks included.

    Args:
        spans: of one rank's model; collectives run at the same time and have no place in this row.
    """
    runs = [list(run) for _, run in groupby(sorted(spans, key=lambda s: s.start_s), key=lambda s: s.lane)]
    return [replace(run[0], name=run[0].lane, end_s=max(s.end_s for s in run)) for run in runs]


def merge_ranks(spans_by_rank: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Shift the spans of all ranks by one amount, so that the first of all begins at 0 s."""
    start = min((span.start_s for spans in spans_by_rank for span in spans), default=0.0)
    return [
        [replace(span, start_s=span.start_s - start, end_s=span.end_s - start) for span in spans]
        for spans in spans_by_rank
    ]


# --- For Perfetto ----------------------------------------------------------------------------------


def _threads(spans: Sequence[Span]) -> Iterator[tuple[str, list[Span]]]:
    for lane in LANES:
        for number, row in enumerate(rows_of([span for span in spans if span.lane == lane])):
            yield f"{lane} {number}" if number else lane, row


def _named(kind: str, rank: int, thread: int, **args: object) -> dict:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": args}


def _complete(span: Span, rank: int, thread: int) -> dict:
    args = {} if span.bytes is None else {"bytes": span.bytes}
    place = {"pid": rank, "tid": thread, "ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6}
    return {"ph": "X", "name": span.name, "cat": span.lane, "args": args, **place}
