"""Do the pictures of lesson 08 show the numbers they were given, and stay readable?"""

from ddp_course import draw
from ddp_course.draw.statistics import backward_sums, combined_statistics, statistics_noise

ROWS = [[1.0, 2.0, 3.0], [10.125], []]
LOCAL = [(2.0, 2.0, 3), (10.125, 0.0, 1), (0.0, 0.0, 0)]
WHOLE = (4.03125, 12.876, 4)


def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    many = [[-123.456] * 9] * 4
    pictures = (
        combined_statistics(ROWS, LOCAL, WHOLE),
        combined_statistics(many, [(-123.456, 12345.678, 128)] * 4, (-123.456, 12345.678, 512)),
        combined_statistics([[1.0]], [(1.0, 0.0, 1)], (1.0, 0.0, 1)),
        backward_sums([6, 5, 1, 0], [(-1234.567, 1234.567)] * 4, (-1234.567, 1234.567)),
        statistics_noise([2, 4, 8], {"mean": [0.7, 0.5, 0.3], "variance": [1.4, 0.9, 0.5]}, "spread"),
    )
    readable(pictures, most_bytes=64_000)


def test_every_number_is_in_the_picture():
    texts = draw.texts_of(combined_statistics(ROWS, LOCAL, WHOLE))
    assert "rank 0\n1  2  3" in texts and "rank 2\nno rows" in texts
    assert "mean: 10.125\nspread: 0\ncount: 1" in texts
    assert "mean: 4.031\nvariance: 12.876\ncount: 4" in texts


def test_the_sums_of_backward_are_in_the_picture():
    texts = draw.texts_of(backward_sums([3, 1], [(1.5, -2.0), (0.25, 4.0)], (0.4375, 0.5)))
    assert "rank 0\n3 rows" in texts and "rank 1\n1 row" in texts
    assert "sum of dy: 1.5\nsum of dy * n: -2" in texts
    assert "both sums, divided\nby 4 rows:\nmean(dy): 0.438\nmean(dy * n): 0.5" in texts


def test_the_chart_draws_what_was_measured():
    (ax,) = statistics_noise([2, 8], {"mean": [0.7, 0.3], "variance": [1.4, 0.5]}, "off by").axes
    assert [list(line.get_ydata()) for line in ax.lines] == [[0.7, 0.3], [1.4, 0.5]]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["2", "8"] and ax.get_ylabel() == "off by"
