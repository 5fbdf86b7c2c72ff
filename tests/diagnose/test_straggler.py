"""Who comes last, and does it matter? All on planted records."""

import pytest

from ddp_course.diagnose.straggler import arrivals, find_straggler
from ddp_course.launcher.calls import Collective


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


def test_what_the_others_would_gain_counts_not_the_distance_to_the_first():
    """Two ranks are equally slow: without either of them the step would be as long."""
    assert find_straggler([record(steps(0)), record(steps(30)), record(steps(31))]).fault is None


def test_little_is_not_worth_a_word():
    assert find_straggler([record(steps(0)), record(steps(5))]).fault is None


def test_ranks_that_are_late_in_turns_are_not_stragglers():
    late = [[step * 50 + (30 if step % 3 == rank else 0) for step in range(9)] for rank in range(3)]
    found = find_straggler([record(times) for times in late])
    assert found.fault is None and "came last to 3 of 9" in found.evidence


def test_a_rank_that_is_late_in_every_other_step_is_not_named():
    late = [step * 50 + (30 if step % 2 == 0 else -30) for step in range(9)]
    assert find_straggler([record(steps(0, 9)), record(late)]).fault is None


def test_one_late_step_does_not_make_a_straggler():
    late = steps(0)
    late[4] += 500
    assert find_straggler([record(steps(0)), record(late)]).fault is None


@pytest.mark.parametrize("records", [[], [record(steps(0))], [record(steps(0, 3)), record(steps(30, 3))], [[], []]])
def test_too_little_to_compare(records):
    found = find_straggler(records)
    assert found.fault is None and "too few" in found.evidence


def test_collectives_are_matched_by_their_number_on_the_default_group():
    mine = record([0, 10, 20]) + record([5, 5, 5], group="subgroup 1")
    yours = record([11, 21, 31], first=2)
    assert arrivals([mine, yours]) == [[0.0, 0.001], [0.01, 0.011]]
