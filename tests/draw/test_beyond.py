"""The pictures of lesson 17 show the figures they are given, and no text collides."""

from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from ddp_course import draw
from ddp_course.beyond.schedules import timetable
from ddp_course.draw.beyond import _held
from ddp_course.draw.style import PAPER


def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    history = [("", 10), *[("forward", 20 + i) for i in range(9)], *[("backward", 40 - i) for i in range(9)]]
    figures = [
        draw.holdings(),
        draw.live_bytes({"DDP": [*history, ("optimizer", 25)], "FSDP": history}, 2, "DDP needs more"),
        draw.pipeline_passes({"GPipe": timetable("gpipe", 4, 6), "1F1B": timetable("1f1b", 4, 6)}),
    ]
    readable(figures)


def test_the_bubble_is_what_is_left_white():
    table = timetable("gpipe", 3, 4)
    figure = draw.pipeline_passes({"GPipe": table})
    white = sum(patch.get_facecolor()[:3] == (1, 1, 1) for patch in figure.axes[0].patches)
    assert white == sum(step is None for row in table for step in row) > 0


def test_rank_0_holds_a_quarter_under_fsdp_and_all_under_ddp():
    def held(strategy, kind):
        return sum(_held(strategy, kind, layer, part) for layer in range(4) for part in range(4))

    assert (held("DDP", "state"), held("ZeRO-1", "state"), held("FSDP (ZeRO-3)", "parameters")) == (16, 4, 4)
    assert (held("ZeRO-2", "parameters"), held("ZeRO-2", "gradients"), held("ZeRO-2", "state")) == (16, 4, 4)


def test_titles_say_what_the_numbers_say():
    def title(figure):
        return next(text for ax in figure.axes if (text := ax.get_title("left")))

    tables = {"GPipe": timetable("gpipe", 4, 6), "1F1B": timetable("1f1b", 4, 6)}
    assert title(draw.pipeline_passes(tables)).endswith("wait 33% of the time; stage 0 keeps 6 and 4 micro-batches")


def test_the_fullest_moment_has_its_bytes_per_parameter():
    figure = draw.live_bytes({"DDP": [("forward", 10), ("backward", 32), ("optimizer", 20)]}, 2, "The peak is 16")
    (ax,) = figure.axes
    assert figure.get_suptitle() == "The peak is 16" and "16" in [text.get_text() for text in ax.texts]
    assert list(ax.lines[0].get_ydata()) == [5, 16, 10] and list(ax.lines[-1].get_ydata()) == [16]


def test_a_whole_layer_is_filled_and_named(readable):
    seen = [("forward 0", [True, False]), ("forward 1", [False, True]), ("backward 1", [True, True])]
    figure = draw.gathered_layers(seen, 2)
    white = [to_hex(patch.get_facecolor()) for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    assert white.count(to_hex(PAPER)) == 2  # the other rank's shard of the layer that is not whole, twice
    assert figure.axes[0].get_title("left") == "Of 2 layers at most 2 are whole at one moment"
    readable([figure])


def test_the_columns_of_the_table_are_chosen(readable):
    few, words = draw.holdings(4, ("DDP", "ZeRO-1")), "Each stage of ZeRO divides one part more among the ranks"
    assert few.axes[0].get_title("left") == words
    readable([few])
