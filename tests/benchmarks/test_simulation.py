"""Are the table's numbers made rightly of the ranks' seconds? Planted numbers; no time is asserted."""

from dataclasses import replace

import pytest

from benchmarks import simulation
from benchmarks.measure import Row
from benchmarks.simulation import FAR, OVERHEADS, OVERLAP, SWEEP, Case, Found, Step
from ddp_course.scaling.step_profile import Gradient, Profile

# Forward 1 s, backward 12 s with a gradient of 1 MB each second, optimizer 1 s.
PROFILE = Profile(1.0, tuple(Gradient(f"{n}.weight", 10**6, float(12 - n)) for n in reversed(range(12))), 12.0, 1.0)


def ranks_with(seconds, last_launch_s=13.0, buckets=(3, 8), blocks=3):
    """Two ranks that measured the same profile in all blocks; the second one is slower by a half in the last.

    The link is busy for a second with each bucket, half of all that before the last launch.
    """
    found = []
    for factor in (1.0, 1.5):
        steps = {}
        for place, (case, step_s) in enumerate(seconds.items()):
            count = buckets[place % 2]
            late_s = last_launch_s[place % 2] if isinstance(last_launch_s, tuple) else last_launch_s
            step = Step(step_s, late_s, (1.0,) * count, count / 2, 1.25, (13.0,) * count, (13.0,) * count)
            steps[case] = [step] * (blocks - 1) + [replace(step, seconds=step_s * factor)]
        found.append(Found([PROFILE] * blocks, steps))
    return found


def test_a_block_takes_as_long_as_its_slowest_rank():
    case = Case(FAR, 1)
    assert simulation.slowest_of(ranks_with({case: 4.0}), case) == [4.0, 4.0, 6.0]


def test_overheads_are_by_how_much_buckets_without_an_obstacle_make_the_last_gradient_late():
    # Without communication all gradients are there after 13 s. 2 buckets before the last cost 0.9 s, 7 cost 1.4 s.
    # A step ends 1.25 s after the last arrival, of which the optimizer takes 1 s.
    found = ranks_with(dict.fromkeys(OVERHEADS, 20.0), last_launch_s=(13.9, 14.4))
    (profile, *_) = simulation.with_measured_overheads(found)
    assert profile.launch_s == pytest.approx(0.1)
    assert profile.busy_s_per_byte * profile.nbytes == pytest.approx(0.7)
    assert profile.finish_s == pytest.approx(0.25)
    assert simulation.plain_s(profile) == 14.0


def test_all_reduces_that_wait_for_each_other_share_the_time_until_the_last_rank_has_them():
    ranks = [Step(0, 0, (), 0, 0, (1.0, 1.5, 9.0), ends) for ends in ((3.0, 3.5, 10.0), (2.0, 5.0, 10.5))]
    assert simulation.own_seconds(tuple(ranks)) == pytest.approx((2.0 + 2.0 + 1.5) / 3)


def test_each_block_is_predicted_with_its_own_all_reduces():
    found = ranks_with(dict.fromkeys(OVERHEADS, 20.0), last_launch_s=(13.0, 13.0))
    for rank in found:
        for case, buckets in zip(OVERHEADS, (3, 8), strict=True):
            # The last block takes 2 s for each of its buckets, of whatever size; the others take none.
            ends_s = tuple(13.0 + 2 * (n + 1) for n in range(buckets))
            rank.steps[case][-1] = replace(rank.steps[case][-1], real_ends_s=ends_s)
    profiles = simulation.with_measured_overheads(found)
    assert [profile.own_seconds(4 * 10**6) for profile in profiles] == pytest.approx([0.0, 0.0, 2.0])


def test_the_error_is_that_of_the_medians_and_its_limit_holds_for_either_sign():
    found = ranks_with(dict.fromkeys(OVERHEADS, 14.0) | dict.fromkeys(simulation.CASES["mlp"], 10.0))
    rows = {row.key: row for row in simulation.step_rows("mlp", found, 2)}
    # The last bucket is launched after 13 s and takes milliseconds of the link: 10 s is off by two fifths.
    assert rows["measured_mlp_1gbe_4"].median == 10.0
    assert rows["predicted_mlp_1gbe_4"].median == pytest.approx(14.25, rel=0.01)
    assert rows["error_mlp_1gbe_4"].median == pytest.approx(42.5, abs=1)
    (target,) = [t for t in simulation.targets(list(rows.values())) if "1 GbE, 4 layers" in t.what]
    assert (target.holds, target.limit) == (False, 10.0)
    rows["error_mlp_1gbe_4"].samples = [-9.0]
    (target,) = [t for t in simulation.targets(list(rows.values())) if "1 GbE, 4 layers" in t.what]
    assert (target.holds, target.measured) == (True, 9.0)


def test_the_note_counts_the_predictions_within_the_limit():
    rows = [Row(f"error_{n}", "", 2, "%", [error]) for n, error in enumerate((-12.0, 3.0, 10.0))]
    assert simulation.in_short([*rows, Row("measured_1", "", 2, samples=[1.0])]) == (
        "2 of 3 steps are predicted within 10 %: the median of the errors is 10.0 %, the largest 12.0 %."
    )
    assert simulation.in_short([]) == "No steps were predicted in this run."


def test_the_sweep_counts_sizes_between_the_predicted_and_the_measured_best():
    seconds = dict.fromkeys(OVERHEADS, 14.0) | {Case(FAR, n): 20.0 - place for place, n in enumerate(SWEEP)}
    rows = simulation.sweep_rows(ranks_with(seconds), 2)
    predicted = [row.median for row in rows if row.key.startswith("predicted_")]
    assert rows[-1].samples == [len(SWEEP) - 1 - predicted.index(min(predicted))]  # measured, the largest is best
    assert rows[-1].samples[0] > 1
    (target,) = simulation.targets(rows)
    assert target.holds is False


def test_all_that_can_be_hidden_is_all_but_the_last_bucket():
    assert simulation.unhidden(Step(20.0, 13.0, (1.0,) * 11, 10.0, 1.0)) == 0.0
    assert simulation.unhidden(Step(20.0, 13.0, (1.0,) * 11, 8.0, 1.0)) == pytest.approx(0.2)
    assert simulation.unhidden(Step(20.0, 13.0, (1.0,) * 11, 10.5, 1.0)) == 0.0
    rows = simulation.overlap_rows("conv", ranks_with(dict.fromkeys(OVERLAP.values(), 15.0)), 2)
    # Half of 3 seconds, of which 2 could be hidden; and half of 8, of which 7 could.
    verdicts = [(t.measured, t.holds) for t in simulation.targets(rows)]
    assert verdicts == [(pytest.approx(25.0), False), (pytest.approx(100 * 3 / 7), False)]


def test_the_tuned_link_is_busy_as_long_as_backward():
    for world_size in (2, 4):
        link = simulation.as_long_as_backward(PROFILE, world_size)
        assert link.all_reduce_seconds(PROFILE.nbytes, world_size) == pytest.approx(PROFILE.backward_s)


def test_overheads_are_measured_with_a_link_that_no_case_has_and_at_least_twelve_cases_are_predicted():
    cases = [case for cases in simulation.CASES.values() for case in cases]
    assert {case.link for case in OVERHEADS} == {simulation.NO_OBSTACLE}
    assert simulation.NO_OBSTACLE not in {FAR, *(case.link for case in cases)}
    assert len(set(cases)) == 8 and len(cases) * 3 >= 12  # two networks share their links; 2, 3 and 4 ranks
