"""Is the interval as wide as it has to be, and no wider?"""

import math
import random

import pytest

from ddp_course.scaling.intervals import Interval, mean_interval, ratio_interval, student_t


def test_the_mean_of_four_runs():
    found = mean_interval([1.0, 2.0, 3.0, 4.0])
    far = 3.1824463 * math.sqrt(5 / 3) / 2  # t for 3 degrees of freedom, standard deviation, root of 4 runs
    assert found.value == 2.5
    assert found.low == pytest.approx(2.5 - far) and found.high == pytest.approx(2.5 + far)


def test_a_quotient_is_of_sums_and_not_a_mean_of_quotients():
    assert ratio_interval([1.0, 9.0], [1.0, 3.0]).value == 10 / 4  # the mean of the quotients is 2


def test_noise_that_hits_both_alike_does_not_widen_the_interval():
    below = [1.0, 5.0, 2.0, 3.0]
    together = ratio_interval([0.5 * b for b in below], below)
    assert (together.low, together.value, together.high) == pytest.approx((0.5, 0.5, 0.5))
    apart = ratio_interval([0.5 * b for b in reversed(below)], below)
    assert apart.high - apart.low > 0.5


@pytest.mark.parametrize("rounds", [4, 7, 40])
def test_95_of_100_intervals_hold_the_true_quotient(rounds):
    chance, held = random.Random(0), 0
    for _ in range(2000):
        noise = [1 + 0.1 * chance.random() for _ in range(rounds)]  # of the machine
        below = [n * (1 + 0.05 * chance.gauss(0, 1)) for n in noise]
        above = [0.8 * n * (1 + 0.05 * chance.gauss(0, 1)) for n in noise]
        held += ratio_interval(above, below).holds(0.8)
    assert 0.93 < held / 2000 < 0.97


@pytest.mark.parametrize("degrees, far", [(1, 12.706), (2, 4.303), (10, 2.228), (60, 2.000), (10**6, 1.960)])
def test_student_t_is_what_every_table_prints(degrees, far):
    assert student_t(degrees) == pytest.approx(far, abs=5e-4)


def test_what_has_no_interval_is_refused():
    with pytest.raises(ValueError, match="at least twice"):
        mean_interval([1.0])
    with pytest.raises(ValueError, match="found 2 above and 1 below"):
        ratio_interval([1.0, 2.0], [1.0])


def test_an_interval_in_another_unit():
    assert Interval(2.0, 1.0, 3.0).scaled(10) == Interval(20.0, 10.0, 30.0)
