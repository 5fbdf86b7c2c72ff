"""What does a picture say to somebody who does not see it?

`described` reads a figure as matplotlib holds it: titles, axes with their units, every line and bar with its numbers or
their range, and the words that are written into it, or what a drawing itself `says`. IPython stores that text beside
each picture as its `alt`, and JupyterLab, a web page and a screen reader find it there.

Left out on purpose: colours and positions. A picture whose point is in its colours says it in its title as well.
Read next: `style.py`, the look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

MOST_NUMBERS = 8  # of a line or a row of bars that are listed; of more, the first, the last and the range
MOST_LETTERS = 1500


def described(figure: Figure) -> str:
    """Return the titles, labels, numbers and words of a figure, in one paragraph."""
    overall = figure.get_suptitle() if hasattr(figure, "get_suptitle") else ""
    parts = [overall, *(" ".join(_axes(each)) for each in figure.axes if each.get_visible())]
    loose = [text.get_text() for text in figure.texts if text.get_text() != overall]
    said = " ".join(" ".join([*parts, *loose]).split())
    return said if len(said) <= MOST_LETTERS else f"{said[: MOST_LETTERS - 1]}…"


def _axes(axes: Axes) -> Iterator[str]:
    titles = filter(None, (axes.get_title(loc=place) for place in ("left", "center", "right")))
    yield from (f"{title}." for title in titles)
    labels = [f"{word}: {label}" for word, label in (("across", axes.get_xlabel()), ("up", axes.get_ylabel())) if label]
    if labels:
        yield f"Axes: {', '.join(labels)}."
    for line in axes.lines:
        if axes.axison or not str(line.get_label()).startswith("_"):  # else it is a stroke of a drawing
            yield from _line(line)
    for bars in axes.containers:
        widths = getattr(bars, "orientation", "vertical") == "horizontal"
        values = [each.get_width() if widths else each.get_height() for each in getattr(bars, "patches", [])]
        if values:
            yield f"Bars{_of(bars.get_label())}: {numbers(values)}."
    sizes = Counter(" by ".join(map(str, image.get_array().shape[:2])) for image in axes.images)
    for size, count in sizes.items():
        yield f"An image of {size} cells." if count == 1 else f"{count} images of {size} cells."
    points = sum(len(each.get_offsets()) for each in axes.collections if hasattr(each, "get_offsets"))
    if points > 1:
        yield f"{points} points."
    ticks = [each.get_text() for axis in (axes.xaxis, axes.yaxis) for each in axis.get_ticklabels()]
    names = [each for each in ticks if any(map(str.isalpha, each)) and "$" not in each]
    if axes.axison and names:
        yield f"Marked: {', '.join(names)}."
    if says := getattr(axes, "says", ""):  # set by a drawing whose words, one by one, would not tell it
        yield says
        return
    words = list(dict.fromkeys(" ".join(text.get_text().split()) for text in axes.texts))
    if written := [word for word in words if word]:
        yield f"Written in it: {'; '.join(written)}."


def _line(line: Line2D) -> Iterator[str]:
    values = [float(value) for value in line.get_ydata() if value == value]
    upright, named = len({*line.get_xdata()}) == 1, not str(line.get_label()).startswith("_")
    if upright and line.get_transform() != line.axes.transData:  # drawn by axvline: its own heights mean nothing
        yield f"Line{_of(line.get_label())} at {numbers([float(line.get_xdata()[0])])}."
        return
    if len(values) > 1 and (named or len(set(values)) > 1 and not upright):  # else a stroke, or a level
        yield f"Line{_of(line.get_label())}: {numbers(values)}."


def _of(label: object) -> str:
    return "" if str(label).startswith("_") or not label else f' "{label}"'


def numbers(values: Sequence[float]) -> str:
    """Return a few numbers as they are, and of many the first, the last and the range."""
    shown = [f"{value:.3g}" for value in values]
    if len(values) <= MOST_NUMBERS:
        return ", ".join(shown)
    return f"{len(values)} values, from {shown[0]} to {shown[-1]}, between {min(values):.3g} and {max(values):.3g}"


def install() -> None:
    """Have pictures of this kernel carry their description; without Jupyter there is nothing to do. Done on import."""
    try:
        from matplotlib_inline import backend_inline
    except ImportError:
        return
    fetch = backend_inline._fetch_figure_metadata
    if getattr(fetch, "describes", False):
        return

    def metadata(figure: Figure) -> dict:
        return {**(fetch(figure) or {}), "image/png": {"alt": described(figure)}}

    metadata.describes = True
    backend_inline._fetch_figure_metadata = metadata


install()
