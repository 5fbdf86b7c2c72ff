"""torch's Flight Recorder keeps its word, on every torch that we support."""

from __future__ import annotations

import pytest

from tests.launch import on_ranks

pytestmark = pytest.mark.timeout(60)


def test_every_collective_is_recorded_with_number_shape_and_size(two_ranks):
    two_ranks.run(on_ranks.add_ranks)  # an earlier call does not count
    expected = [
        (1, "all_reduce", "Float", ((10,),), 40, False),
        (2, "broadcast", "Double", ((2, 3),), 48, False),
        (3, "all_reduce", "Float", ((5,),), 20, False),
        (1, "all_reduce", "Float", ((1,),), 4, True),
        (4, "barrier", "", (), 0, False),
    ]
    assert two_ranks.run(on_ranks.collectives) == [expected, expected]


def test_a_collective_under_way_is_not_finished(two_ranks):
    (before, after), (_, after_other) = two_ranks.run(on_ranks.in_flight)
    assert (before, after, after_other) == (False, True, True)
