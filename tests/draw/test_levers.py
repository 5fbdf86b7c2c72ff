"""Do the pictures of lesson 14's levers show the numbers they were given, and say that they are simulated?"""

import pytest
from matplotlib.colors import same_color

from ddp_course.draw.levers import exposed, lever
from ddp_course.draw.style import ALARM, tint
from ddp_course.scaling import spans
from ddp_course.scaling.spans import Span
from tests.draw.readable import texts_of

WAITING = tint(ALARM, 0.75)


def step(buckets, talking_ms, backward_ms=30.0, from_ms=0.0):
    """Forward of 10 ms, backward, `buckets` equal messages on a link that carries one at a time, optimizer of 2 ms."""
    begin, end, free = 10.0, 10.0 + backward_ms, 0.0
    found = [("forward", 0.0, begin, "forward"), ("backward", begin, end, "backward")]
    for number in range(1, buckets + 1):
        start = max(free, begin + backward_ms * number / buckets)
        free = start + talking_ms / buckets
        found.append((f"bucket {number}", start, free, "all-reduce"))
    found.append(("optimizer", max(free, end), max(free, end) + 2.0, "optimizer"))
    return [Span(name, (from_ms + a) / 1000, (from_ms + b) / 1000, lane, 1000) for name, a, b, lane in found]


def pictures():
    yield lever([("one bucket", step(1, 40)), ("six buckets", step(6, 40))], "overlap")
    yield lever([(name, step(4, ms)) for name, ms in (("1 GbE", 3000), ("10 GbE", 30), ("NVLink", 1))], "interconnect")
    yield lever([("hundred buckets", step(100, 300))])


def test_no_text_collides_every_picture_fits_a_notebook_and_says_that_it_is_simulated(readable):
    figures = list(pictures())
    assert all("simulated" in " ".join(texts_of(figure)) for figure in figures)
    readable(figures, most_bytes=40_000)


def widths_ms(ax, colour, row):
    """How wide the bars of one colour are in the row that begins at `row`."""
    bars = [bar for bar in ax.patches if row < bar.get_y() < row + 1 and same_color(bar.get_facecolor(), colour)]
    return [round(bar.get_width(), 6) for bar in bars]


def test_lever_marks_what_the_model_waits_for_and_where_a_step_ends():
    # Six messages of 40/6 ms, the first ready after 5 ms of backward: they end at 55 ms, and backward ends at 40 ms.
    figure = lever([("one", step(1, 40)), ("six", step(6, 40, from_ms=500.0))], "overlap")
    (ax,) = figure.axes
    assert widths_ms(ax, WAITING, 2) == [40] and widths_ms(ax, WAITING, 5.1) == [15]
    texts = texts_of(figure)
    assert {"one", "six", "82 ms", "57 ms"} <= set(texts) and texts.count("link") == 2
    assert ax.says == "one: 82 ms, 40 of them exposed. six: 57 ms, 15 of them exposed."
    assert "all-reduce: overlapped" in texts
    assert "all-reduce: overlapped" not in texts_of(lever([("one", step(1, 40))]))
    with pytest.raises(ValueError, match="'after' has no spans"):
        lever([("before", step(1, 1)), ("after", [])])


@pytest.mark.parametrize("buckets, talking_ms", [(1, 40), (6, 40), (6, 4), (3, 300), (1, 0.5)])
def test_exposed_is_what_spans_calls_exposed(buckets, talking_ms):
    taken = step(buckets, talking_ms)
    assert sum(end - start for start, end in exposed(taken)) == pytest.approx(spans.exposed_seconds(taken))


def test_exposed_finds_gaps_of_the_model_within_a_message():
    work = [Span("", 2, 3, "backward"), Span("", 5, 7, "backward"), Span("", 9, 9.5, "optimizer")]
    talk = [Span("", 1, 6, "all-reduce"), Span("", 6, 8, "other collective")]
    assert exposed(work + talk) == [(1, 2), (3, 5), (7, 8)]
    assert exposed(work) == [] and exposed(talk) == [(1, 8)]
