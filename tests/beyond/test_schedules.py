"""Is the bubble as large as the formula says, and is each pass after what it needs?"""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_course.beyond.schedules import ORDERS, Pass, bubble, timetable

shapes = given(st.sampled_from(sorted(ORDERS)), st.integers(1, 6), st.integers(1, 9))


@shapes
def test_the_bubble_is_that_of_the_formula(schedule, stages, micro_batches):
    assert bubble(schedule, stages, micro_batches) == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert all(len(row) == 2 * (micro_batches + stages - 1) for row in timetable(schedule, stages, micro_batches))


@shapes
def test_every_pass_comes_once_and_after_what_it_needs(schedule, stages, micro_batches):
    table = timetable(schedule, stages, micro_batches)
    tick = {(stage, step): time for stage, row in enumerate(table) for time, step in enumerate(row) if step}
    assert len(tick) == 2 * stages * micro_batches
    for (stage, step), time in tick.items():
        if step.kind == "forward" and stage:
            assert tick[stage - 1, step] < time
        if step.kind == "backward":
            assert tick[stage, Pass("forward", step.micro)] < time
            assert stage == stages - 1 or tick[stage + 1, step] < time


@shapes
def test_gpipe_keeps_all_micro_batches_and_1f1b_no_more_than_stages_are_left(schedule, stages, micro_batches):
    for stage in range(stages):
        order = ORDERS[schedule](stage, stages, micro_batches)
        kept = max(accumulate(1 if step.kind == "forward" else -1 for step in order))
        assert kept == (micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage))


def test_a_small_timetable():
    picture = ["".join("." if p is None else p.kind[0] for p in row) for row in timetable("1f1b", 3, 4)]
    assert picture == ["fff..bfb.b.b", ".ff.bfbfb.b.", "..fbfbfbfb.."]
