"""How does every picture of the course come to look the same?

One palette and one set of font sizes for all. The unit of every drawing is the inch, so a number in the code is a
length on the page. `shapes.py` draws boxes, arrows and labels with them, `charts.py` plots numbers.

Left out on purpose: anything about training. The pictures themselves are in the files beside this one.
"""

from __future__ import annotations

from matplotlib.colors import to_rgb

DPI = 100
WIDTH = 8.0  # inches: 800 pixels, the width of a notebook's output on a small laptop

HEADING = 11
LABEL = 10
SMALL = 9
MONO = "DejaVu Sans Mono"

INK = "#222222"
MUTED = "#5f6368"
LINE = "#8a8f98"
FAINT = "#d0d3d8"
PAPER = "#ffffff"
SHARED = "#444444"  # what belongs to all ranks: the kernel, a store, a mean
ALARM = "#b00020"

# Six of Okabe and Ito's colours, which stay apart for colour-blind readers, and two darker ones. A picture
# never relies on the colour alone: the rank's number stands beside it.
RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8F8B00", "#7A4E2D")


def rank_colour(rank: int) -> str:
    """The colour of a rank, the same in every picture; repeats after eight ranks."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def tint(colour: str, strength: float = 0.16) -> tuple[float, float, float]:
    """The colour mixed with white: `strength` 0 is white, 1 is the colour itself."""
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(colour))
    return red, green, blue
