"""Between which numbers does a measured one lie?

A step that is measured again takes another time. The mean of several runs is known up to its standard error; Student's
t says how many of those to go to either side, so that the interval holds the true mean in 95 of 100 such experiments.
An efficiency is a quotient of two measured times. If both were measured in the same round, a busy moment slows both,
and `ratio_interval` looks at what remains of each round when the quotient is taken out.

Left out on purpose: other levels than 95 %, and runs whose times are far from any bell curve; more runs help there.
Read next: `efficiency.py`, what is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A measured number, and the 95 % interval around it."""

    value: float
    low: float
    high: float

    def holds(self, number: float) -> bool:
        """Whether `number` is in the interval, so that the runs do not speak against it."""
        return self.low <= number <= self.high

    def scaled(self, factor: float) -> Interval:
        """The same in another unit: `factor` is positive."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


def student_t(degrees: int) -> float:
    """Return how many standard errors lie on each side of a mean; `degrees` is one less than the number of runs.

    Raises:
        ValueError: fewer than one degree of freedom.
    """
    if degrees < 1:
        raise ValueError("one run has no interval: measure at least twice")
    from scipy.special import stdtrit  # slow to import, and no rank needs it

    return float(stdtrit(degrees, 0.975))  # the quantile with 2.5 % above it


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of repeated runs with its interval.

    Raises:
        ValueError: fewer than two runs.
    """
    return ratio_interval(values, [1.0] * len(values))


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the mean of `above` by the mean of `below`, with its interval; the i-th of both come from one round.

    This is no mean of quotients: a round in which `below` was small by chance would weigh too much there.

    Raises:
        ValueError: fewer than two rounds, or not as many of one as of the other.
    Source: Cochran, Sampling Techniques, 3rd edition 1977, section 6.3, the variance of a ratio.
    """
    rounds = len(above)
    if rounds != len(below):
        raise ValueError(f"expected as many numbers below as above, found {rounds} above and {len(below)} below")
    far = student_t(rounds - 1)
    ratio = sum(above) / sum(below)
    left_over = sum((a - ratio * b) ** 2 for a, b in zip(above, below, strict=True))
    error = math.sqrt(left_over / (rounds * (rounds - 1))) / abs(sum(below) / rounds)
    return Interval(ratio, ratio - far * error, ratio + far * error)
