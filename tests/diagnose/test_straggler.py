"""Who comes last, and does it matter? All on planted records."""

import pytest

from ddp_course.diagnose.straggler import arrivals, find_straggler
from ddp_course.launcher.rank_status import Collective


def record(times_ms, group="", first=1):
    """One rank's records: it enters collective `first`, `first` + 1, ... at these times."""
    return [
        Collective(seq, seq, "all_reduce", "float32", ((1000,),), group, (0, 1, 2), True, 10**18 + int(at * 1e6))
        for seq, at in enumerate(times_ms, first)
    ]


def steps(delay_ms, count=8, step_ms=50):
    return [step * step_ms + delay_ms for step in range(count)]


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_slow_rank_is_named(slow):
    found = find_straggler([record(steps(30 if rank == slow else 2 * rank)) for rank in range(3)])
    assert (found.fault, found.rank) == ("straggler", slow)
    assert "came last to 8 of 8 collectives" in found.evidence and "of a step of 50 ms" in found.evidence


@pytest.mark.parametrize(
    ("times", "last"),
    [
        ([steps(0), steps(30), steps(31)], "8 of 8"),  # two are slow: without either the step would be as long
        ([steps(0), steps(5)], "8 of 8"),  # too little to be worth a word
        ([[50 * step + 30 * (step % 3 == rank) for step in range(9)] for rank in range(3)], "3 of 9"),  # in turns
        ([steps(0, 9), [50 * step + (30 if step % 2 == 0 else -30) for step in range(9)]], "5 of 9"),
        ([steps(0), [*steps(0)[:4], 700, *steps(0)[5:]]], "7 of 8"),  # late once, and else no later than the other
    ],
)
def test_no_one_is_named_without_whom_the_others_would_gain_little_or_seldom(times, last):
    found = find_straggler([record(of_rank) for of_rank in times])
    assert found.fault is None and f"came last to {last} collectives" in found.evidence


@pytest.mark.parametrize("records", [[], [record(steps(0))], [record(steps(0, 3)), record(steps(30, 3))], [[], []]])
def test_too_little_to_compare(records):
    found = find_straggler(records)
    assert found.fault is None and "too few" in found.evidence


def test_collectives_are_matched_by_their_number_on_the_default_group():
    mine = record([0, 10, 20]) + record([5, 5, 5], group="subgroup 1")
    yours = record([11, 21, 31], first=2)
    assert arrivals([mine, yours]) == [[0.0, 0.001], [0.01, 0.011]]
