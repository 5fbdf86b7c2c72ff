"""Does the picture of lesson 08 show the numbers it was given, and stay readable?"""

from ddp_course.draw.statistics import backward_sums
from tests.draw.readable import texts_of


def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    pictures = (
        backward_sums([6, 5, 1, 0], [(-1234.567, 1234.567)] * 4, (-1234.567, 1234.567)),
        backward_sums([1], [(1.0, 0.0)], (1.0, 0.0)),
    )
    readable(pictures, most_bytes=64_000)


def test_the_sums_of_backward_are_in_the_picture():
    texts = texts_of(backward_sums([3, 1], [(1.5, -2.0), (0.25, 4.0)], (0.4375, 0.5)))
    assert "rank 0\n3 samples" in texts and "rank 1\n1 sample" in texts
    assert "sum of dy: 1.5\nsum of dy * n: -2" in texts
    assert "both sums, divided\nby 4 samples:\nmean(dy): 0.438\nmean(dy * n): 0.5" in texts
