"""Do the pictures of lesson 16 show the numbers they were given, and stay readable?"""

from ddp_course.draw.language import accumulation_step, dealt_windows, gpt_block
from tests.draw.readable import texts_of

ORDER = [7, 2, 11, 0, 9, 4, 12, 1, 5, 8, 3, 10, 6]


def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    pictures = (
        dealt_windows(ORDER, 2, 2, 4),
        dealt_windows(ORDER, 3, 1, 0),
        dealt_windows(list(range(16)), 4, 2, 16),
        gpt_block(),
        accumulation_step(2, 3),
        accumulation_step(2, 1),
        accumulation_step(4, 8),
    )
    readable(pictures)


def test_dealt_windows_shows_each_window_twice_and_fills_those_read():
    figure = dealt_windows(ORDER, 2, 2, 4)
    texts = texts_of(figure)
    assert all(texts.count(f"{window}") == 2 for window in range(13)) and "position 4" in texts
    filled = [shape for shape in figure.axes[0].patches if shape.get_facecolor()[:3] != (1.0, 1.0, 1.0)]
    assert len(filled) == 2 * 4 + 2  # in both rows, and the legend's


def test_accumulation_step_has_one_average_and_all_micro_batches():
    texts = texts_of(accumulation_step(2, 3))
    assert [texts.count(f"micro-batch {micro}") for micro in range(4)] == [2, 2, 2, 0]
    assert (texts.count("average"), texts.count("clip"), texts.count("update")) == (1, 2, 2)
    assert not any("no_sync" in text for text in texts_of(accumulation_step(2, 1)))
