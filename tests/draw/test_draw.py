"""Do the pictures build, show the data they were given, and stay readable?"""

import matplotlib
import numpy as np
import pytest

from ddp_course import draw
from ddp_course.draw import shapes, style
from ddp_course.draw.overview import overview
from tests.draw.readable import text_problems, texts_of

IMAGES = np.arange(4 * 8 * 8, dtype=float).reshape(4, 8, 8)


def pictures():
    """Each picture with small and with large data."""
    for world_size in (1, 2, 4, 8):
        ranks = range(world_size)
        yield draw.all_reduce([float(rank) for rank in ranks], [28.0] * world_size)
        yield draw.rank_map(world_size, nodes=min(2, world_size))
        yield draw.subgroups({"all of them": list(ranks)}, world_size)
        yield draw.shards([IMAGES] * world_size, [[0, 1, 2, 9]] * world_size, [[0, 10, 1000, 1796]] * world_size)
    for world_size in (2, 4):
        numbers = [-1.125] * world_size
        yield draw.data_parallel_step(numbers, ["x = 1"] * world_size, *[numbers] * 3)
        yield draw.collective_calls([["all_reduce"] * 3] * (world_size - 1) + [["barrier"]])
        yield overview([[2.0, 1.0]] * world_size, [2.0, 1.0])
        yield draw.rendezvous(world_size, "a file", ["0/rank 0", "0/rank 1"])


@pytest.mark.slow
def test_no_text_collides_leaves_its_box_or_leaves_the_page_and_pictures_fit_a_notebook(readable):
    readable(pictures())


def test_the_check_finds_what_a_reader_would_not_like():
    figure, ax = shapes.canvas(2.0)
    shapes.box(ax, 1.0, 0.5, 0.3, 0.3, "much too long for this box")
    shapes.label(ax, 4.0, 1.5, "one text")
    shapes.label(ax, 4.1, 1.5, "upon another")
    shapes.label(ax, 7.9, 1.0, "over the edge")
    assert text_problems(figure) == [
        "'one text' collides with 'upon another'",
        "'much too long for this box' sticks out of its box",
        "'over the edge' leaves the page",
    ]


def test_the_map_of_8_ranks_on_2_nodes_restarts_the_local_rank_on_each_node():
    texts = texts_of(draw.rank_map(8, nodes=2))
    assert [text for text in texts if text.startswith("rank")] == [f"rank {rank}" for rank in range(8)]
    local = [text for text in texts if text.startswith("local")]
    assert local == [f"local\nrank {rank}" for rank in (0, 1, 2, 3, 0, 1, 2, 3)]
    assert [text for text in texts if text.startswith("node")] == ["node 0", "node 1"]
    assert texts.index("node 1") > texts.index("rank 3")


def test_the_map_refuses_nodes_that_do_not_divide():
    with pytest.raises(ValueError, match="3 nodes cannot share 8 ranks evenly"):
        draw.rank_map(8, nodes=3)


def test_a_call_that_one_rank_skipped_is_marked_where_it_is_missing():
    texts = texts_of(draw.collective_calls([["broadcast", "all_reduce"], ["broadcast"], ["broadcast", "all_reduce"]]))
    assert [text for text in texts if text.startswith("call")] == [
        "call 1: all arrived: done",
        "call 2: 2 of 3 arrived: they wait",
    ]
    assert texts.count("not called") == 1
    after_rank_1 = texts[texts.index("rank 1") :]
    assert after_rank_1[:3] == ["rank 1", "broadcast", "not called"]


@pytest.mark.parametrize(
    ("calls", "title"),
    [
        ([3, 3, 2, 3], "Rank 2 never made call 3, so the other 3 ranks wait"),
        ([3, 3, 4, 3], "Only rank 2 made call 4, so it waits alone"),
        ([1, 0], "Rank 1 never made call 1, so rank 0 waits"),
        ([2, 1, 1, 2], "2 ranks never made call 2, so the other 2 ranks wait"),
        ([2, 2], "Every rank made every call, so none waits"),
    ],
)
def test_the_title_of_the_calls_says_who_is_missing_and_who_waits(calls, title):
    figure = draw.collective_calls([["all_reduce"] * count for count in calls])
    assert figure.axes[0].get_title(loc="left") == title


def test_a_title_above_a_drawing_fits_the_page_and_leaves_the_drawing_as_it_is():
    figure, ax = shapes.canvas(2.0)
    shapes.finding(ax, "what it shows")
    figure.canvas.draw()
    assert ax.get_window_extent().height == pytest.approx(2.0 * style.DPI)
    assert ax.get_ylim() == (0, 2.0)
    assert figure.bbox.contains(*ax._left_title.get_window_extent().corners()[3])


def test_a_step_says_when_replicas_are_not_the_same():
    def notes(after):
        figure = draw.data_parallel_step([1.0, 1.0], ["a", "b"], [2.0, 4.0], [3.0, 3.0], after)
        return [text for text in texts_of(figure) if "same on all ranks" in text]

    assert notes([0.7, 0.7]) == ["the same on all ranks"] * 3
    assert notes([0.7, 0.7001]) == ["the same on all ranks"] * 2 + ["not the same on all ranks"]


def test_subgroups_fill_the_dots_of_members_only():
    figure = draw.subgroups({"even": [0, 2], "odd": [1, 3]}, 4)
    dots = [patch for patch in figure.axes[0].patches if isinstance(patch, matplotlib.patches.Circle)]
    filled = [matplotlib.colors.to_hex(dot.get_facecolor()).lower() != style.PAPER for dot in dots]
    assert filled == [True, False, True, False, False, True, False, True]
    with pytest.raises(ValueError, match=r"group 'odd': ranks \[1, 4\] are not all in 0 to 3"):
        draw.subgroups({"odd": [1, 4]}, 4)


def test_the_losses_of_the_overview_are_the_numbers_it_was_given():
    lines = overview([[3.0, 1.0], [2.0, 2.0]], mean=[2.5, 1.5]).axes[-1].lines
    assert {line.get_label(): list(line.get_ydata()) for line in lines} == {
        "rank 0": [3.0, 1.0],
        "rank 1": [2.0, 2.0],
        "mean over ranks": [2.5, 1.5],
    }


def test_shards_shows_each_ranks_own_images_labels_and_indices():
    figure = draw.shards([IMAGES[:2], IMAGES[2:]], [[5, 6], [7, 8]], [[0, 2], [1, 3]])
    texts = texts_of(figure)
    assert texts[0] == "The ranks take turns: the first 2 images of each shard (above: the label, below: the index)"
    assert texts[1:] == ["rank 0", "5", "#0", "6", "#2", "rank 1", "7", "#1", "8", "#3"]
    shown = [image.get_array() for image in figure.axes[0].images]
    assert all(np.array_equal(one, two) for one, two in zip(shown, IMAGES, strict=True))
    halves = texts_of(draw.shards([IMAGES[:2], IMAGES[2:]], [[5, 6], [7, 8]], [[0, 1], [2, 3]]))
    assert halves[0].startswith("The ranks take no turns: the first 2 images")


def test_ranks_keep_their_colour_and_the_first_eight_differ():
    assert len({draw.rank_colour(rank) for rank in range(8)}) == 8
    assert draw.rank_colour(3) == draw.rank_colour(11)


def test_all_reduce_shows_what_went_in_and_what_came_out():
    texts = texts_of(draw.all_reduce([1.0, 2.5], [3.5, 3.5], operation="sum"))
    assert texts[0] == "Each rank puts in its own number, and each gets the same result: 3.5"
    assert texts[1:] == ["before", "after", "all_reduce: sum", "rank 0", "1", "3.5", "rank 1", "2.5", "3.5"]
