"""Do the pictures of lesson 15 show the numbers they were given, and stay readable?"""

from ddp_course import draw
from ddp_course.draw.recovery import agents, killed_run, lost_time

DISTANCES = [2.0**i for i in range(4, 16)]
SAVING, REPEATING = [20 / d for d in DISTANCES], [(d / 4 + 120) / 40_000 for d in DISTANCES]
TRIED = [(64.0, 0.32), (1024.0, 0.03), (16384.0, 0.11)]


def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    pictures = (
        killed_run(90, [(0, 53, "killed"), (45, 90, "done")], [20, 40, 45, 60, 80]),
        killed_run(90, [(0, 32, "left"), (32, 53, "killed"), (45, 90, "done")], [20, 32, 40, 45, 60, 80]),
        killed_run(1000, [(0, 1, "killed"), (0, 999, "killed"), (998, 1000, "done")], [998]),
        lost_time(DISTANCES, SAVING, REPEATING, TRIED, 1789.0),
        agents(),
        agents(3, 2, dead=1),
        agents(2, 3),
    )
    readable(pictures)


def test_killed_run_counts_the_steps_that_are_kept_and_those_done_twice():
    texts = draw.texts_of(killed_run(90, [(0, 53, "killed"), (45, 90, "done")], [20, 40, 45, 60, 80]))
    assert [texts.count(text) for text in ("90 steps", "45 steps", "8", "53 steps")] == [1, 2, 1, 0]
    figure = killed_run(90, [(0, 32, "left"), (32, 90, "done")], [20, 32])
    assert {"32 steps", "58 steps"} <= set(draw.texts_of(figure))
    marks = [line.get_marker() for line in figure.axes[0].lines]
    assert [marks.count(mark) for mark in "vXs"] == [2 + 1, 1, 1 + 1]  # and one each in the legend


def test_lost_time_draws_the_sum_and_what_was_tried():
    figure = lost_time(DISTANCES, SAVING, REPEATING, TRIED, 1789.0)
    by_name = {line.get_label(): line for line in figure.axes[0].lines}
    total = [a + b for a, b in zip(SAVING, REPEATING, strict=True)]
    assert list(by_name["both, by the formula"].get_ydata()) == total
    assert list(by_name["tried out"].get_ydata()) == [share for _, share in TRIED]
    assert "best: 1789 steps" in draw.texts_of(figure)


def test_agents_number_the_ranks_that_live_anew():
    texts = draw.texts_of(agents(2, 2))
    assert [f"RANK {rank}\nLOCAL_RANK {rank % 2}" in texts for rank in range(5)] == [True] * 4 + [False]
    texts = draw.texts_of(agents(3, 2, dead=1))
    assert "RANK 3\nLOCAL_RANK 1" in texts and "RANK 4\nLOCAL_RANK 0" not in texts
    assert {"node 1: gone", "was RANK 2", "was RANK 3"} <= set(texts) and "was RANK 4" not in texts
