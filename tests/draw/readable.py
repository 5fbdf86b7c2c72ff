"""Can every text of a picture be read? The tests ask it of every one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text
from matplotlib.transforms import Bbox


def texts_of(figure: Figure) -> list[str]:
    """Every text that the picture wrote, in drawing order; not the numbers along a chart's axes."""
    return [text.get_text() for text in _written(figure)]


def text_problems(figure: Figure) -> list[str]:
    """Sentences about texts that collide, stick out of their box, or leave the page; empty is good."""
    figure.canvas.draw()
    texts = [(text.get_text(), text.get_window_extent()) for text in _written(figure)]
    shapes = [shape for ax in figure.axes for shape in ax.patches if isinstance(shape, FancyBboxPatch)]
    frames = [shape.get_window_extent() for shape in shapes]
    pairs = combinations(texts, 2)
    problems = [f"{one!r} collides with {two!r}" for (one, a), (two, b) in pairs if a.overlaps(b)]
    for text, extent in texts:
        if not _inside(extent, figure.bbox):
            problems.append(f"{text!r} leaves the page")
        middle = ((extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2)
        if any(frame.contains(*middle) and not _inside(extent, frame) for frame in frames):
            problems.append(f"{text!r} sticks out of its box")
    return problems


def _inside(inner: Bbox, outer: Bbox) -> bool:
    across = outer.x0 <= inner.x0 and inner.x1 <= outer.x1
    return across and outer.y0 <= inner.y0 and inner.y1 <= outer.y1


def _written(figure: Figure) -> Iterator[Text]:
    for ax in figure.axes:
        legend = ax.get_legend()
        own = [ax.title, ax.xaxis.label, ax.yaxis.label] if ax.axison else []
        titles = [text for text in ax.get_children() if isinstance(text, Text) and text not in (ax.title, *ax.texts)]
        for text in [*titles, *own, *ax.texts, *(legend.get_texts() if legend else [])]:
            if text.get_text().strip():
                yield text
