"""Do the pictures of lesson 19 show the numbers they were given, and stay readable?"""

import math

import pytest

from ddp_course import draw
from ddp_course.draw.games import cart_poses, episode_ends, players, return_bands, return_curves, seed_table

FALLS = [(0.02 * i, 0.1, 0.022 * i, 0.5) for i in range(11)]  # 0.22 rad at the end: lost
STANDS = [(-0.004 * i, 0.0, 0.02 * (-1) ** i, 0.0) for i in range(500)]
CURVES = {
    "1 rank": ([250 * i for i in range(1, 41)], [None, 20.0, *(20.0 + 10 * i for i in range(38))]),
    "2 ranks": ([500 * i for i in range(1, 41)], [20.0 + 12 * i for i in range(40)]),
}
BANDS = {
    "1 rank": [([None, 20.0, None, 60.0], 2.0), ([10.0, 30.0, 50.0, 100.0], 2.0)],
    "2 ranks": [([10.0, 20.0, 30.0, 30.0], 4.0), ([50.0] * 4, 4.0)],
}
SEEDS = {
    "seed + rank": [[r + s for r in range(3)] for s in range(3)],
    "own": [[9 * r + s for r in range(3)] for s in range(3)],
}


def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    pictures = (
        cart_poses({"untrained": FALLS, "trained": STANDS}),
        cart_poses({"at the edges": [(2.4, 0, 0.2, 0), (-2.4, 0, -0.2, 0)]}),
        players(),
        players(3, 16),
        episode_ends(),
        return_curves(CURVES),
        return_curves({"2 ranks": CURVES["2 ranks"]}),
        return_bands(BANDS),
        seed_table(SEEDS),
    )
    readable(pictures)


def test_the_pole_leans_as_the_state_says_and_a_lost_cart_is_marked():
    figure = cart_poses({"untrained": FALLS})
    ax = figure.axes[0]
    assert "untrained: 10 steps" in draw.texts_of(figure)
    poles = [line for line in ax.lines if line.get_linewidth() == 3]
    leans = [math.atan2(line.get_xdata()[1] - line.get_xdata()[0], line.get_ydata()[1] - line.get_ydata()[0])
             for line in poles]  # fmt: skip
    assert leans == pytest.approx([FALLS[i][2] for i in (0, 2, 4, 6, 8, 10)])
    colours = [line.get_color() for line in poles]
    assert len(set(colours[:-1])) == 1 and colours[-1] not in colours[:-1]


def test_curves_leave_out_iterations_without_an_end_and_average_the_last_ones():
    first, second = return_curves(CURVES, window=2).axes
    one, two, _ = first.lines
    assert list(one.get_xdata())[:2] == [500, 750] and list(one.get_ydata())[:3] == [20, 20, 25]
    assert list(two.get_ydata())[:3] == [20, 26, 38]
    assert list(second.lines[0].get_xdata())[:2] == [2, 3]


def test_bands_hold_the_mean_and_the_range_of_the_seeds_and_the_seconds_of_a_turn():
    figure = return_bands(BANDS, window=1)
    turns, seconds = figure.axes
    assert list(turns.lines[0].get_ydata()) == [15, 25, 35, 80]  # gaps: the value before, or the first there is
    assert list(turns.lines[0].get_xdata()) == [1, 2, 3, 4] and list(seconds.lines[1].get_xdata()) == [1, 2, 3, 4]
    ranges = [max(part.get_paths()[0].vertices[:, 1]) for part in turns.collections]
    assert ranges == [100, 50]
    assert "1 rank 80, 2 ranks 40; after 2.0 s: 1 rank 80, 2 ranks 35" in figure.get_suptitle()


def test_one_run_alone_has_one_panel():
    figure = return_curves({"2 ranks": CURVES["2 ranks"]})
    title = "Mean training return of 2 ranks: 464 after 20,000 steps"  # of the last five turns: 488 less 2 * 12
    assert len(figure.axes) == 1 and figure.axes[0].get_title("left") == title
    assert "2 ranks: 452 after 19,500 steps" in return_curves(CURVES, solved=450).axes[0].get_title("left")


def test_seeds_that_occur_twice_are_dashed():
    ax = seed_table(SEEDS).axes[0]
    dashed = [shape for shape in ax.patches if shape.get_linestyle() == "--"]
    assert len(ax.patches) == 18 and len(dashed) == 7  # 0 and 4 stand alone
