"""Do the pictures of lesson 05 show the indices they were given, and stay readable?"""

import matplotlib

from ddp_course.data.sampler import ShardSampler
from ddp_course.draw import words
from ddp_course.draw.sampling import dealt
from ddp_course.draw.style import ALARM, rank_colour
from tests.draw.readable import texts_of


def shards(length, world_size, **settings):
    return [list(ShardSampler(length, world_size, rank, **settings)) for rank in range(world_size)]


def pictures():
    for world_size in (1, 2, 4, 8):
        for mode in ("compatible", "streaming"):
            yield dealt(shards(10, world_size, mode=mode), 10)
        yield dealt(shards(10, world_size, drop_last=True), 10)
    yield dealt([list(range(12))] * 4, 12)
    yield dealt([[0], [0]], 40)


def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    readable(pictures())


def test_dealt_shows_every_index_and_marks_the_second_time():
    figure = dealt([[4, 0, 3], [1, 2, 4]], 6)
    texts = texts_of(figure)
    title = "5 of 6 samples seen; 1 repeated (dashed); 1 never seen: 5"
    assert texts == [title, "step", "0", "1", "2", "rank 0", "4", "0", "3", "rank 1", "1", "2", "4"]
    assert words.described(figure) == f"{title}. Rank 0: 4, 0, 3. Rank 1: 1, 2, 4."
    dashed = [patch for patch in figure.axes[0].patches if patch.get_linestyle() == "--"]
    assert len(dashed) == 1 and dashed[0].get_edgecolor() == matplotlib.colors.to_rgba(ALARM)


def test_dealt_counts_by_steps_not_by_ranks():
    """Sample 1 is rank 1's first and rank 0's second: rank 0 has it later."""
    patches = dealt([[0, 1], [1, 2]], 3).axes[0].patches
    edges = [patch.get_edgecolor() for patch in patches]
    assert edges == [matplotlib.colors.to_rgba(c) for c in (rank_colour(0), ALARM, rank_colour(1), rank_colour(1))]


def test_what_no_rank_got_is_listed():
    assert texts_of(dealt([[0]], 5))[0] == "1 of 5 samples seen; 4 never seen: 1, 2, 3, 4"
    assert texts_of(dealt([[0]], 40))[0] == "1 of 40 samples seen; 39 never seen: 1, 2, 3, ..."
    assert texts_of(dealt(shards(8, 2), 8, "Even shards"))[0] == "Even shards: 8 of 8 samples seen"
