"""Do the pictures of lessons 01 and 02 show the numbers they were given, and stay readable?"""

import pytest

from ddp_course.draw.data_parallel import (
    shard_gradients,
    stacked,
)
from tests.draw.readable import texts_of

PARTS = {
    "master": {"weights": 4.0, "outputs and all their gradients": 32.5},
    "other": {"weights": 4.0, "outputs and all their gradients": 0.0},
}


def pictures():
    yield shard_gradients([5, 5, 2], [-0.12345, 0.2, 0.01], 0.5)
    for world_size in (1, 2, 4):
        yield shard_gradients([3] * world_size, [-0.12345] * world_size, -0.12345, weighted=False)
    yield stacked(PARTS, "MB", "The master holds more")


def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    readable(pictures(), most_bytes=80_000)


def test_shards_are_as_wide_as_their_samples_and_a_wrong_mean_is_called_wrong():
    right = shard_gradients([3, 1], [1.0, 5.0], 2.0)
    assert texts_of(right)[-1] == "2.00000: the batch's gradient"
    widths = [patch.get_width() for patch in right.axes[0].patches if hasattr(patch, "get_boxstyle")][1:3]
    assert (widths[0] + 0.06) / (widths[1] + 0.06) == pytest.approx(3)
    texts = texts_of(shard_gradients([3, 1], [1.0, 5.0], 2.0, weighted=False))
    assert texts[-1] == "3.00000, but the batch has 2.00000" and texts.count("× 1/2") == 2
    alike = texts_of(shard_gradients([2, 2], [1.0, 5.0], 3.0))
    assert "weight" in texts and "weight" not in alike and not any("×" in text for text in alike)


def test_stacked_bars_are_as_long_as_their_parts_and_name_every_number():
    figure = stacked(PARTS, "MB", "The master holds more")
    texts = texts_of(figure)
    assert texts[0] == "The master holds more"
    assert {"36.5 MB", "4 MB", "4", "32.5", "weights", "outputs and all their gradients"} <= set(texts)
    widths = [patch.get_width() for patch in figure.axes[0].patches[:3]]
    assert widths[1] / widths[0] == pytest.approx(32.5 / 4) and widths[2] == pytest.approx(widths[0])


def test_titles_state_what_the_numbers_show():
    assert texts_of(shard_gradients([3, 1], [1.0, 5.0], 2.0))[0].endswith("is the gradient of the batch")
    assert texts_of(shard_gradients([3, 1], [1.0, 5.0], 2.0, weighted=False))[0].endswith(
        "is not the gradient of the batch"
    )
