"""Does the timeline show when what ran, and stay readable with measured, crowded and odd spans?"""

import pytest
from matplotlib.patches import Rectangle

from ddp_course.draw.style import rank_colour, tint
from ddp_course.draw.timelines import timeline
from ddp_course.scaling.spans import Span
from tests.draw.readable import texts_of

pytestmark = pytest.mark.timeout(120)


def step(shift=0.0, reduces=3, each=0.004, gap=0.001):
    """Backward ends at 30 ms; the all-reduces begin at 15 ms, `gap` apart."""
    found = [
        Span("forward", 0.0, 0.010, "forward"),
        Span("one", 0.010, 0.020, "backward"),
        Span("two", 0.020, 0.030, "backward"),
        Span("rest of backward", 0.030, 0.040, "waiting"),
        Span("optimizer", 0.040, 0.0401, "optimizer"),
    ]
    for number in range(reduces):
        start = 0.015 + number * gap
        found.append(Span("all_reduce", start, start + each, "all-reduce", 2**20 * (number + 1)))
    return [Span(s.name, s.start_s + shift, s.end_s + shift, s.lane, s.bytes) for s in found]


def bars(figure):
    """(left, width) of every bar, in milliseconds."""
    found = [p for p in figure.axes[0].patches if isinstance(p, Rectangle)]
    return [(round(p.get_x(), 6), round(p.get_width(), 6)) for p in found]


def test_bars_stand_where_the_spans_were_on_one_clock():
    figure = timeline([step(5.0, reduces=1), step(5.002, reduces=1)])
    drawn = bars(figure)
    assert (0, 10) in drawn and (2, 10) in drawn  # the forward passes, 2 ms apart
    assert (10, 20) in drawn and (12, 20) in drawn  # backward, of two nodes
    assert (15, 4) in drawn and (17, 4) in drawn  # the all-reduces
    lines = [line.get_xdata()[0] for line in figure.axes[0].lines]
    assert [round(x, 6) for x in lines] == [30, 32]  # where the last gradient was ready


def test_each_all_reduce_has_its_number_and_size():
    texts = texts_of(timeline([step()]))
    assert [text for text in texts if "MiB" in text] == ["0: 1.0 MiB", "1: 2.0 MiB", "2: 3.0 MiB"]
    assert "rank 0" in texts and "3 all-reduces" in texts


@pytest.mark.parametrize(
    "ranks",
    [
        [step(reduces=1)],
        [step(), step(0.003)],
        [step(reduces=8, gap=0.0005)] * 4,
        [step(reduces=12, each=0.0001, gap=0.002)] * 2,
        [step(reduces=60, each=0.0005, gap=0.0004)] * 2,
        [step(reduces=0), step(reduces=0)],
        [step(reduces=1, each=0.5)],
        [step(), [*step(), Span("reduce_scatter_tensor", 0.012, 0.013, "other collective")]],
    ],
    ids=["one", "two ranks", "eight at once", "naive", "sixty", "none", "a long one", "another collective"],
)
def test_texts_do_not_collide(ranks, readable):
    readable([timeline(ranks, title="a step")])


def test_the_legend_has_what_the_picture_has():
    texts = texts_of(timeline([[span for span in step() if span.lane in ("backward", "all-reduce")]]))
    assert texts[-3:] == ["backward", "all-reduce", "last gradient ready"]


def test_forward_and_backward_are_shown_in_the_colours_of_all_ranks():
    legend = timeline([step(), step()]).axes[0].get_legend()
    colours = [patch.get_facecolor()[:3] for patch in legend.findobj(Rectangle)[:4]]
    assert colours == [tint(rank_colour(rank), strength) for strength in (0.3, 0.85) for rank in (0, 1)]


def test_a_label_that_would_meet_the_dashed_line_stands_left_of_its_bar():
    sizes = [text for text in timeline([step(reduces=2, gap=0.014)]).axes[0].texts if "MiB" in text.get_text()]
    assert [text.get_ha() for text in sizes] == ["left", "left"]  # bars from 15 to 19 ms, and across the line at 30
    (before,) = (text for text in timeline([step(reduces=1, each=0.014)]).axes[0].texts if "MiB" in text.get_text())
    assert before.get_ha() == "right" and before.get_position()[0] < 15  # a bar from 15 to 29 ms


def test_many_all_reduces_at_once_are_drawn_without_labels():
    figure = timeline([step(reduces=30, each=0.01, gap=0.0001)])
    assert not [text for text in texts_of(figure) if "MiB" in text]
    assert "30 all-reduces" in texts_of(figure)
    assert len([bar for bar in bars(figure) if bar[1] == 10]) == 30 + 2  # and forward, waiting


def test_the_page_depends_on_the_number_of_all_reduces_and_not_on_their_times():
    heights = [timeline([step(reduces=n, gap=gap)]).get_figheight() for n in (5, 30) for gap in (0.0021, 0.005)]
    assert heights[0] == heights[1] and heights[2] == heights[3]


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="no spans to draw"):
        timeline([[], []])


def test_it_says_what_overlaps():
    says = timeline([step(5.0, reduces=3, gap=0.01)]).axes[0].says  # they start at 15, 25 and 35 ms
    assert says == (
        "Rank 0: backward runs from 10 to 30 ms; 2 of 3 all-reduces start before its end; the last bar ends at 40 ms."
    )
