"""What does the home page show? The six changes, a hang's report and a moving ring, each taken from the course itself.

The lines of the diff come from `programs/`, the report is the stored output of lesson 00, and the ring's values are
those of four ranks that run `ring_reduce_scatter` and `ring_all_gather` while the site is built.

Read next: `index.md`, which shows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from ddp_course import collectives, launch
from ddp_course.draw import rank_colour

ROOT = Path(__file__).parents[1]
# Of the changes that replace a line: which line of one_device.py it was.
REPLACED = {2: "sampler = RandomSampler(train, generator=order)", 4: "order.manual_seed(epoch)"}
GRADIENTS = ((1, 2, 3, 4), (5, 1, 2, 2), (2, 4, 1, 3), (3, 2, 6, 1))  # by rank, by chunk


def changes() -> str:
    """Return the changes that `ddp.py` marks by their numbers, as a diff of `one_device.py`."""
    before = (ROOT / "programs/one_device.py").read_text().splitlines()
    after = [line.strip() for line in (ROOT / "programs/ddp.py").read_text().splitlines()]
    found = []
    for at, line in enumerate(after):
        if marked := re.search(r"# (\d): ", line):
            found.append((int(marked[1]), after[at : at + 1 + line.startswith("#")]))
    if {number for number, _ in found} != set(range(1, 7)):
        raise ValueError("programs/ddp.py does not mark six changes")
    lines = []
    for number, new in sorted(found, key=lambda each: each[0]):
        if old := REPLACED.get(number):
            if old not in map(str.strip, before) or old in after:
                raise ValueError(f"change {number} does not replace {old!r}")
            lines.append(f"- {old}")
        lines += [f"+ {each}" for each in new]
    return "\n".join(lines) + "\n"


def hang() -> str:
    """Return the report of lesson 00's first hang."""
    cells = json.loads((ROOT / "notebooks/00_start_here.ipynb").read_text())["cells"]
    texts = ("".join(output.get("text", ())) for cell in cells for output in cell.get("outputs", ()))
    return next(text[text.index("rank ") :] for text in texts if "never entered all_reduce" in text)


# --- The ring --------------------------------------------------------------------------------------

STEP_S, MOVE, START_S, END_S = 1.6, 0.6, 1.4, 3.4  # seconds, and the part of a step in which messages travel
CELL, HIGH, TITLE = 50, 34, 26  # of a chunk's box; pixels
CORNERS = ((0, 0), (1, 0), (1, 1), (0, 1))  # clockwise, so each rank sends to the next
LEFT, TOP, FAR, DEEP = 10, 4, 300, 150


def ring_on_a_rank(rank: int, world_size: int) -> list[list[int]]:
    """Return what this rank holds before each step of a ring all-reduce, and at its end.

    Collective: a ring_reduce_scatter and a ring_all_gather; every rank.
    """
    chunks = [torch.tensor([value]) for value in GRADIENTS[rank]]
    held: list[list[int]] = []
    pass_on = collectives._pass_on

    def noted(*args):
        held.append([chunk.item() for chunk in chunks])
        return pass_on(*args)

    collectives._pass_on = noted
    collectives.ring_reduce_scatter(chunks)
    collectives.ring_all_gather(chunks)
    return [*held, [chunk.item() for chunk in chunks]]


def ring() -> str:
    """Return the moving picture, which needs nothing else: SVG, with the animation in CSS."""
    held = launch(ring_on_a_rank, len(GRADIENTS), backend="gloo", start_method="forkserver", quiet=True)
    steps = len(held[0]) - 1
    total = START_S + steps * STEP_S + END_S
    after = [0.0, *(START_S + (step + 1) * STEP_S - (1 - MOVE) * STEP_S for step in range(steps)), total]
    rules: dict[str, str] = {}

    def seen(first: float, last: float, kind: str = "") -> str:
        """Return the attributes of what shows from `first` to `last`, in seconds."""
        name, a, b = f"ring-{first * 10:.0f}-{last * 10:.0f}", 100 * first / total, 100 * last / total
        start = f"0%,{a - 0.01:.2f}%{{opacity:0}}" if first else ""
        end = f"{b + 0.01:.2f}%,100%{{opacity:0}}" if last < total else ""
        rules[name] = f"@keyframes {name}{{{start}{a:.2f}%,{b:.2f}%{{opacity:1}}{end}}}"
        return f'class="{kind}{"" if last < total else " last"}" style="animation-name:{name}"'

    told = ["each rank has a gradient in four chunks"]
    told += [f"step {n} of {steps}: {'add' if n <= steps // 2 else 'copy'} what arrives" for n in range(1, steps + 1)]
    told.append("every rank has every sum")
    until = [0.0, *(START_S + step * STEP_S for step in range(steps)), after[steps], total]
    body = [_links(), *(_caption(words, seen(*until[n : n + 2], "note")) for n, words in enumerate(told))]
    for rank, rows in enumerate(held):
        x, y = _corner(rank)
        body.append(f'<text class="rank" x="{x}" y="{y + 16}" style="fill:{rank_colour(rank)}">rank {rank}</text>')
        for chunk in range(len(GRADIENTS)):
            for value, first, last in _spells([row[chunk] for row in rows]):
                full = value == rows[-1][chunk]
                attributes = seen(after[first], after[last], "full" if full else "")
                body.append(f"<g {attributes}>{_box(*_place(rank, chunk), value)}</g>")
    for step in range(steps):
        begin = START_S + step * STEP_S
        for rank, rows in enumerate(held):
            right = (rank + 1) % len(held)
            chunk = next(c for c in range(len(rows[0])) if held[right][step][c] != held[right][step + 1][c])
            body.append(_message(rank, right, chunk, rows[step][chunk], begin, total, rules))
    style = STYLE + f"#ring g,#ring .note{{animation-duration:{total:.1f}s}}" + "".join(rules.values())
    words = f"Four ranks in a ring pass chunks to the right, {steps} times; at the end each holds all four sums."
    view = f'viewBox="0 0 {LEFT * 2 + FAR + 4 * CELL} {DEEP + TITLE + HIGH + 40}"'
    return f'<svg id="ring" {view} role="img" aria-label="{words}"><style>{style}</style>{"".join(body)}</svg>\n'


STYLE = (
    "#ring{width:100%;height:auto;font-family:inherit}"
    "#ring g,#ring .note{opacity:0;animation-iteration-count:infinite;animation-timing-function:linear}"
    "#ring .last{opacity:1}"
    "#ring text{font-size:17px;text-anchor:middle;fill:var(--pst-color-text-base)}"
    "#ring .rank{font-weight:600;text-anchor:start;font-size:15px}"
    "#ring .note{fill:var(--pst-color-text-muted);font-size:15px}"
    "#ring rect{fill:var(--pst-color-background);stroke:var(--pst-color-border);stroke-width:1.5}"
    "#ring line{stroke:var(--pst-color-border);stroke-width:2}"
    "#ring .full rect{fill:var(--pst-color-text-base)}#ring .full text{fill:var(--pst-color-background)}"
    "#ring .sent text{fill:#fff;font-weight:600}#ring .sent rect{stroke:none}"
    "@media (prefers-reduced-motion:reduce){#ring g,#ring .note{animation:none}}"
)


def _spells(values: list[int]) -> Iterator[tuple[int, int, int]]:
    """A value, the first moment at which a chunk holds it, and the moment from which it holds another."""
    first = 0
    for moment in range(1, len(values) + 1):
        if moment == len(values) or values[moment] != values[first]:
            yield values[first], first, moment
            first = moment


def _corner(rank: int) -> tuple[float, float]:
    column, row = CORNERS[rank]
    return LEFT + column * FAR, TOP + row * DEEP


def _place(rank: int, chunk: int) -> tuple[float, float]:
    x, y = _corner(rank)
    return x + chunk * CELL, y + TITLE


def _box(x: float, y: float, value: int, inset: float = 0, fill: str = "") -> str:
    size = f'width="{CELL - 2 * inset}" height="{HIGH - 2 * inset}" rx="{4 + inset}"'
    style = f' style="fill:{fill}"' * bool(fill)
    text = f'<text x="{x + CELL / 2}" y="{y + HIGH / 2 + 6}">{value}</text>'
    return f'<rect x="{x + inset}" y="{y + inset}" {size}{style}/>{text}'


def _message(rank: int, right: int, chunk: int, value: int, begin: float, total: float, rules: dict[str, str]) -> str:
    (x, y), (to_x, to_y) = _place(rank, chunk), _place(right, chunk)
    name = f"ring-of-{rank}-{begin * 10:.0f}"
    a, b = 100 * begin / total, 100 * (begin + MOVE * STEP_S) / total
    there = f"translate({to_x - x:g}px,{to_y - y:g}px)"
    rules[name] = (
        f"@keyframes {name}{{0%,{a - 0.01:.2f}%{{opacity:0;transform:none}}{a:.2f}%{{opacity:1;transform:none;"
        f"animation-timing-function:ease-in-out}}{b:.2f}%{{opacity:1;transform:{there}}}"
        f"{b + 0.01:.2f}%,100%{{opacity:0;transform:{there}}}}}"
    )
    return f'<g class="sent" style="animation-name:{name}">{_box(x, y, value, 3, rank_colour(rank))}</g>'


def _links() -> str:
    """The four ways of the ring, clockwise."""
    wide, level = 4 * CELL, TITLE + HIGH / 2
    near, far = LEFT + wide + 6, LEFT + FAR - 6
    above, below = TOP + TITLE + HIGH + 6, TOP + DEEP + TITLE - 6
    middle = wide / 2 + LEFT
    ways = (
        (near, TOP + level, far, TOP + level),
        (middle + FAR, above, middle + FAR, below),
        (far, TOP + DEEP + level, near, TOP + DEEP + level),
        (middle, below, middle, above),
    )
    head = '<path d="M0 0 8 4 0 8z" fill="var(--pst-color-border)"/>'
    arrow = f'<marker id="ring-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" orient="auto">{head}</marker>'
    lines = "".join(f'<line x1="{a}" y1="{b}" x2="{c}" y2="{d}" marker-end="url(#ring-head)"/>' for a, b, c, d in ways)
    return f"<defs>{arrow}</defs>{lines}"


def _caption(words: str, attributes: str) -> str:
    middle = LEFT + (FAR + 4 * CELL) / 2
    return f'<text x="{middle}" y="{DEEP + TITLE + HIGH + 30}" {attributes}>{words}</text>'
