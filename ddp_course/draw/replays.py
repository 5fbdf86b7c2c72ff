"""How does one step through a recorded run, event by event?

One page of HTML that needs nothing else, for a browser, a lesson, or an attachment to an issue. Python puts the events
into rows and writes them into `replays.html`, which draws them and answers keys and pointer.

The page is our own since no kept library fits. The scripts of Bokeh and Plotly, 1.3 and 4.8 MB, are larger than a
lesson may be, and this page is small enough to be stored in the lesson that shows it. To step by key from event to
event, and to be as dark as the lesson around it, would be ours to write with them as well.

The page that a cell shows is stored in the notebook, so a site of the lessons has it without running them.

Read next: `events.py`, what is shown; `timelines.py`, the same step as a picture.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

from ddp_course.draw.events import Event, Recording
from ddp_course.draw.style import SHARED, rank_colour
from ddp_course.scaling.spans import TALKING, Span, rows_of

TEMPLATE = Path(__file__).with_suffix(".html")
MOST_BYTES = 250_000  # of events
MOST_LETTERS = 160  # of a name or a line
POINT = 0.02  # of the whole, the room that an event without a length takes


class Replay:
    """A page; as the last value of a cell, it is shown in the notebook.

    Attributes:
        page: the HTML.
        says: what it shows, in words that are the same for every run.
    """

    def __init__(self, page: str, says: str):
        self.page, self.says = page, says

    def write(self, path: str | Path) -> Path:
        """Write the page and return its path."""
        Path(path).write_text(self.page, encoding="utf-8")
        return Path(path)

    def __repr__(self) -> str:
        return self.says

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 420px; border: 0"  # the page then sets its own height
        page = html.escape(self.page).replace("\n", "&#10;")  # one line of a notebook
        return f'<iframe title="{html.escape(self.says)}" style="{style}" srcdoc="{page}"></iframe>'


def replay(recording: Recording, title: str, text: str = "") -> Replay:
    """Make the page of one run.

    Args:
        recording: as `events.of_dumps`, `of_logs` or `of_job` return it. Of too many events for a page of
            300 KB, the last are shown.
        title: what was recorded.
        text: more words for the reader, above the events.
    Raises:
        ValueError: there is no event.
    """
    events = sorted(recording.events, key=lambda event: (event.start, -1 if event.rank is None else event.rank))
    if not events:
        raise ValueError("nothing to replay: no spans, no calls, and no line that speaks of a failure")
    shown = events
    while len(data := _written(shown, recording.timed)) > MOST_BYTES:
        shown = shown[len(shown) // 5 :]
    left_out = f" These are the last {len(shown):,} of {len(events):,} events." * (len(shown) < len(events))
    page = TEMPLATE.read_text(encoding="utf-8")
    for name, words in {"title": title, "text": text, "note": recording.note + left_out}.items():
        page = page.replace(f"{{{{{name}}}}}", html.escape(words))
    ranks, talk = len({event.rank for event in shown}), sum(event.lane in TALKING for event in shown)
    return Replay(page.replace("{{data}}", data), f"{title}: a replay of {ranks} ranks, {talk} collectives or messages")


def _written(events: Sequence[Event], timed: bool) -> str:
    # In a script, "<" could end it.
    return json.dumps(_data(events, timed), separators=(",", ":")).replace("<", "\\u003c")


def _data(events: Sequence[Event], timed: bool) -> dict:
    """What the page's script reads; names and lines are places in `texts`, so that each is written once."""
    start, points = events[0].start, any(event.end == event.start for event in events)
    length = (max(event.end for event in events) - start or 1.0) * (1 + POINT * points)
    ranks = sorted({event.rank for event in events}, key=lambda rank: -1 if rank is None else rank)
    lanes, texts = list(dict.fromkeys(event.lane for event in events)), {}
    rows = {rank: _rows([event for event in events if event.rank == rank], POINT * length) for rank in ranks}
    about = [(_name(rank), SHARED if rank is None else rank_colour(rank), 1 + max(rows[rank])) for rank in ranks]
    next_row = {rank: iter(rows[rank]) for rank in ranks}
    written = [
        (
            *(ranks.index(e.rank), next(next_row[e.rank]), lanes.index(e.lane), _place(texts, e.name)),
            *(round(e.start - start, 6), round(e.end - start, 6), e.bytes, _place(texts, e.line)),
        )
        for e in events
    ]
    own = {"ranks": about, "lanes": lanes, "talk": TALKING, "texts": list(texts), "events": written}
    return {"timed": timed, "length": round(length, 6), **own}


def _name(rank: int | None) -> str:
    return "no rank named" if rank is None else f"rank {rank}"


def _place(texts: dict[str, int], text: str) -> int:
    short = text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"
    return texts.setdefault(short, len(texts))


def _rows(events: Sequence[Event], point: float) -> list[int]:
    """The row of each event of one rank: the model's work above, its collectives below, none on top of another."""
    rows: dict[int, int] = {}
    for talking in (False, True):
        chosen = [(i, event) for i, event in enumerate(events) if (event.lane in TALKING) == talking]
        spans = [Span(str(i), event.start, event.end, event.lane) for i, event in chosen]
        room = [point if span.end_s == span.start_s else 0.0 for span in spans]
        first = 1 + max(rows.values(), default=-1)
        rows |= {int(s.name): first + row for row, packed in enumerate(rows_of(spans, room)) for s in packed}
    return [rows[i] for i in range(len(events))]
