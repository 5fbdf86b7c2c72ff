"""Results that differ never read alike."""

import math

import pytest

from ddp_course.grading.vocabulary.compare import same, told_apart


@pytest.mark.parametrize(
    "found, expected, texts",
    [
        (1.0, 2.0, ("1", "2")),
        (0.123456, 0.123457, ("0.123456", "0.123457")),
        (0.1 + 0.2, 0.3, ("0.30000000000000004", "0.29999999999999999")),
        ([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 6.0], ("[1, 2, 3, 4, 5]", "[1, 2, 3, 4, 6]")),
        (-0.0, 0.0, ("-0", "0")),
        (math.nan, 1.0, ("nan", "1")),
        ("1", 1, ("'1'", "1")),
    ],
    ids=str,
)
def test_results_that_differ_read_differently(found, expected, texts):
    assert told_apart(found, expected) == texts


@pytest.mark.parametrize(
    ("found", "right", "one"),
    [(0.0, math.inf, False), ([1.0], [math.inf], False), (math.inf, math.inf, True), (math.nan, math.nan, True)],
)
def test_only_infinity_is_infinity(found, right, one):
    assert same(found, right) is one
