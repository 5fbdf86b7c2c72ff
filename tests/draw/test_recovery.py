"""Do the pictures of lesson 15 show the numbers they were given, and stay readable?"""

import pytest

from ddp_course.draw.recovery import agents, killed_run, lost_time, sigterm
from tests.draw.readable import texts_of

INTERVALS = [2.0**i for i in range(4, 16)]
SAVING, REPEATING = [20 / d for d in INTERVALS], [(d / 4 + 120) / 40_000 for d in INTERVALS]


def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    pictures = (
        killed_run(90, [(0, 53, "killed"), (45, 90, "done")], [20, 40, 45, 60, 80]),
        killed_run(90, [(0, 32, "left"), (32, 53, "killed"), (45, 90, "done")], [20, 32, 40, 45, 60, 80]),
        killed_run(1000, [(0, 1, "killed"), (0, 999, "killed"), (998, 1000, "done")], [998]),
        lost_time(INTERVALS, SAVING, REPEATING, 1789.0),
        sigterm((1, 30), [None, 30], [30, 30]),
        sigterm((1, 30), [None, 30, None], [31, 31, 31]),
        agents(),
        agents(3, 2, dead=1),
        agents(2, 3),
    )
    readable(pictures)


def test_killed_run_counts_the_steps_that_are_kept_and_those_done_twice():
    texts = texts_of(killed_run(90, [(0, 53, "killed"), (45, 90, "done")], [20, 40, 45, 60, 80]))
    assert [texts.count(text) for text in ("90 steps", "45 steps", "8", "53 steps")] == [1, 2, 1, 0]
    figure = killed_run(90, [(0, 32, "left"), (32, 90, "done")], [20, 32])
    assert {"32 steps", "58 steps"} <= set(texts_of(figure))
    marks = [line.get_marker() for line in figure.axes[0].lines]
    assert [marks.count(mark) for mark in "vXs"] == [2 + 1, 1, 1 + 1]  # and one each in the legend


def test_sigterm_shows_the_flags_and_who_waits():
    texts = texts_of(sigterm((1, 30), [None, 30], [30, 30]))
    steps = ("step 29", "step 30", "step 30\nSIGTERM", "waits in step 31")
    assert [texts.count(text) for text in steps] == [4, 2, 2, 1]
    assert [texts.count(text) for text in ("flag 0", "flag 1", "MAX\n0", "MAX\n1", "has left")] == [3, 1, 1, 1, 3]
    assert "By the largest flag all ranks leave after the same step: 30" in texts


def test_lost_time_draws_the_sum():
    figure = lost_time(INTERVALS, SAVING, REPEATING, 1789.0)
    by_name = {line.get_label(): line for line in figure.axes[0].lines}
    total = [a + b for a, b in zip(SAVING, REPEATING, strict=True)]
    assert list(by_name["both"].get_ydata()) == total
    assert "Young: 1789.0 min" in texts_of(figure)


def test_agents_number_the_ranks_that_live_anew():
    texts = texts_of(agents(2, 2))
    assert [f"RANK {rank}\nLOCAL_RANK {rank % 2}" in texts for rank in range(5)] == [True] * 4 + [False]
    texts = texts_of(agents(3, 2, dead=1))
    assert "RANK 3\nLOCAL_RANK 1" in texts and "RANK 4\nLOCAL_RANK 0" not in texts
    assert {"node 1: gone", "was RANK 2", "was RANK 3"} <= set(texts) and "was RANK 4" not in texts


def test_agents_have_the_store_on_node_0_which_cannot_die_alone():
    left = {text.get_text(): text.get_position()[0] for text in agents(3, 2).axes[0].texts}
    assert left["store, at the address\n--rdzv-endpoint"] < left["node 1"]
    with pytest.raises(ValueError, match="node 0 has the store"):
        agents(2, 2, dead=0)
