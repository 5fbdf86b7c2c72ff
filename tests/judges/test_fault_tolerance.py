"""The solutions of lesson 15, held to trying every distance and to bits."""

import pytest

from ddp_course.grading.source import function_of, solution_of
from ddp_course.grading.vocabulary.play import Seen
from judges.fault_tolerance import resume


@pytest.mark.parametrize("save_s", [0.01, 0.4, 2.0, 3.0])
def test_no_distance_between_saves_loses_less(save_s):
    def lost(every):
        return save_s / (40 * every) + 4 * (40 * every / 2 + 30) / 7200

    every, share = function_of("15.3", "plan_saves", solution_of("15.3"))(40, save_s, 7200, 4, 30)
    assert every == min(range(1, 100), key=lost)
    assert share == pytest.approx(lost(every))


def resumed(rank, world_size, case):
    return resume.act(function_of("15.2", "train_resumable", solution_of("15.2")), case, rank, world_size)


@pytest.mark.parametrize("batches", [3, 4])
def test_a_run_that_was_killed_goes_on_with_the_same_bits(ranks, tmp_path, batches):
    case = ("killed", str(tmp_path / "killed"), 5, batches, resume.STEPS)
    seen = Seen(case, 0, ranks(2).run(resumed, case))
    for at, start in seen["starts"].items():
        assert start["end"] == seen["straight"]["end"]
        assert start["steps"] == seen["straight"]["steps"][at:]
