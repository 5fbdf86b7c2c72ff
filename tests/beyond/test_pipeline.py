"""Is the bubble as large as the formula says, and does a pipeline train what one process trains?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_course.beyond import pipeline
from ddp_course.beyond.pipeline import cut
from ddp_course.beyond.schedules import ORDERS, Pass, bubble, most_kept, timetable
from tests.beyond.strategies_on_ranks import TOLERANCE, alone, collectives, network, off_by, rows, trained

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
        kept = most_kept(ORDERS[schedule](stage, stages, micro_batches))
        assert kept == (micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage))


def test_a_small_timetable():
    picture = ["".join("." if p is None else p.kind[0] for p in row) for row in timetable("1f1b", 3, 4)]
    assert picture == ["fff..bfb.b.b", ".ff.bfbfb.b.", "..fbfbfbfb.."]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 8))
def test_cut_loses_no_layer_and_leaves_no_stage_empty(widths, stages):
    layers = [layer for width in widths for layer in (nn.Linear(width, 1, device="meta"), nn.Tanh())]
    model = nn.Sequential(*layers)
    if stages > len(widths):
        with pytest.raises(ValueError, match=f"{stages} stages need as many layers with parameters"):
            cut(model, stages)
        return
    parts = cut(model, stages)
    assert len(parts) == stages
    assert [layer for part in parts for layer in part] == layers
    assert [name for part in parts for name, _ in part.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(isinstance(part[0], nn.Linear) for part in parts)


def test_cut_gives_stages_of_about_one_size():
    model = nn.Sequential(*(nn.Linear(7, 7) for _ in range(8)))
    assert [len(part) for part in cut(model, 4)] == [2, 2, 2, 2]
    with pytest.raises(ValueError, match="nn.Sequential, found Linear"):
        cut(model[0], 1)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("schedule", sorted(ORDERS))
@pytest.mark.parametrize("by", ["course", "torch"])
def test_training_is_that_of_one_process(ranks, by, schedule):
    expected = alone()
    found = ranks.run(trained, ("pipeline", {"by": by, "schedule": schedule, "micro_batches": 6}))
    for one, part in zip(found, cut(network(), len(found)), strict=True):
        assert off_by(one, expected) < TOLERANCE
        mine = sum(p.nbytes for p in part.parameters())
        assert one.held["parameters"] == one.held["gradients"] == mine
    assert sum(one.held["state"] for one in found) == expected.held["state"]


@pytest.mark.timeout(60)
def test_one_message_to_the_next_stage_and_one_back_per_micro_batch(ranks):
    found = ranks.run(collectives, ("pipeline", {"micro_batches": 3}))
    last = len(found) - 1
    widths = [part[-1 if isinstance(part[-1], nn.Linear) else -2].out_features for part in cut(network(), last + 1)]
    for rank, calls in enumerate(found):
        messages = [call for call in calls if call[0] in ("send", "recv")]
        left, right = [8 * 8 * width for width in (widths[rank - 1], widths[rank])]
        forward = [("recv", 0)] * (rank > 0) + [("send", right)] * (rank < last)  # bytes are the sender's
        backward = [("recv", 0)] * (rank < last) + [("send", left)] * (rank > 0)
        assert messages == forward * 3 + backward * 3


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_the_stages_of_1f1b_really_keep_less(ranks):
    found = ranks.run(kept_at_most)
    stages = len(found)
    assert found == [{"gpipe": 6, "1f1b": min(6, stages - rank)} for rank in range(stages)]


def kept_at_most(rank: int, world_size: int) -> dict[str, int]:
    """For each schedule, of how many micro-batches the activations are there at once."""
    most = {}

    class Counting(pipeline.Stage):
        def forward(self, *args):
            loss = super().forward(*args)
            most[name] = max(most.get(name, 0), len(self._kept))
            return loss

    real, pipeline.Stage = pipeline.Stage, Counting
    for name in ORDERS:
        pipeline.train_steps(rank, world_size, network(), *rows(), steps=1, micro_batches=6, schedule=name)
    pipeline.Stage = real
    return most
