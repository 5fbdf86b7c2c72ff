"""Results that differ never read alike, and a result in the wrong precision is told as that."""

import math

import pytest

from ddp_course.grading.vocabulary.compare import same, told_apart
from ddp_course.grading.vocabulary.expect import NEARLY, equals
from ddp_course.grading.vocabulary.play import Note, Seen


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
    "found, cause", [(1 / 3 + 1e-8, NEARLY), (1 / 3 + 1e-3, "divide"), (1 / 3 + 1e-12, None)], ids=str
)
def test_a_result_in_float32_is_told_as_that(found, cause):
    expect = equals("a third:", lambda seen: 1 / 3, lambda seen: [], "divide", tolerance=1e-9)
    fault = expect(Seen(None, 0, [Note(value=found)]))
    assert (fault and fault.cause) == cause
    assert fault is None or fault.found not in fault.expected


@pytest.mark.parametrize(
    ("found", "right", "one"),
    [(0.0, math.inf, False), ([1.0], [math.inf], False), (math.inf, math.inf, True), (math.nan, math.nan, True)],
)
def test_only_infinity_is_infinity(found, right, one):
    assert same(found, right) is one
