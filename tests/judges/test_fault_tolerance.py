"""The solutions of lesson 15, held to trying every distance."""

import pytest

from ddp_course.grading.source import function_of, solution_of


@pytest.mark.parametrize("save_s", [0.01, 0.4, 2.0, 3.0])
def test_no_distance_between_saves_loses_less(save_s):
    def lost(every):
        return save_s / (40 * every) + 4 * (40 * every / 2 + 30) / 7200

    every, share = function_of("15.3", "plan_saves", solution_of("15.3"))(40, save_s, 7200, 4, 30)
    assert every == min(range(1, 100), key=lost)
    assert share == pytest.approx(lost(every))
