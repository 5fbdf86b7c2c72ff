"""Does a sharded optimizer take the steps of the plain one, with a share of its state?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_course.beyond.sharded_optimizer import deal
from tests.beyond import sharded_on_ranks as on_ranks
from tests.beyond.strategies_on_ranks import TOLERANCE, alone, collectives, network, off_by, trained

SIZES = [p.numel() for p in network().parameters()]
BYTES = 8 * sum(SIZES)


@given(st.lists(st.integers(0, 1000), max_size=12), st.integers(1, 5))
def test_the_largest_first_is_never_far_from_equal_shares(sizes, world_size):
    owners = deal(sizes, world_size)
    totals = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(world_size)
    ]
    assert sum(totals) == sum(sizes)
    # Whoever is fullest was the emptiest when its last parameter came.
    assert max(totals) <= sum(sizes) / world_size + max(sizes, default=0)


def test_what_a_rank_has_already_counts():
    assert deal([5, 4, 3, 2], 2) == [0, 1, 1, 0]
    assert deal([5, 4, 3, 2], 2, loads=[10, 0]) == [1, 1, 1, 0]


@pytest.mark.timeout(120)
def test_the_same_bits_as_the_plain_optimizer_and_as_torchs(ranks):
    for found in ranks.run(on_ranks.same_bits):
        assert len(found) == len(on_ranks.CASES)
        assert all(found.values()), found


@pytest.mark.timeout(120)
def test_groups_schedules_frozen_and_added_parameters(ranks):
    for found in ranks.run(on_ranks.awkward):
        assert all(found.values()), found


@pytest.mark.timeout(120)
def test_a_state_is_saved_whole_and_loaded_at_another_world_size(ranks):
    for found in ranks.run(on_ranks.resharded):
        assert all(found.values()), found


@pytest.mark.timeout(120)
def test_state_messages_and_mistakes(ranks):
    found = ranks.run(on_ranks.facts)
    world_size, counters = len(found), 4 * len(SIZES)
    assert sum(facts["bytes"] for facts in found) == 2 * BYTES + counters
    assert max(facts["bytes"] for facts in found) <= (2 * BYTES + counters) / world_size + 2 * 8 * max(SIZES)
    for rank, facts in enumerate(found):
        assert facts["calls"] == [("broadcast", 8 * other["own"]) for other in found]  # by owner, in order
        assert facts["lr"] == (0.9, 0.999)  # the defaults of Adam are to be seen in the groups
        refusal = f"rank {rank} holds 1/{world_size} of the state"
        assert refusal in facts["early"] and refusal in facts["stale"]
        assert facts["gathered"] == len(SIZES) if rank == 0 else refusal in facts["gathered"]
        assert f"rank {rank}: expected groups of [8] parameters, found [1, 1" in facts["groups"]
        assert "LBFGS" in facts["LBFGS"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("by", ["course", "torch", "plain"])
def test_training_is_that_of_one_process(ranks, by):
    expected = alone()
    found = ranks.run(trained, ("sharded_optimizer", {"by": by}))
    assert max(off_by(one, expected) for one in found) < TOLERANCE
    for one in found:
        assert one.held["parameters"] == one.held["gradients"] == BYTES
    states = sum(one.held["state"] for one in found)
    assert states == expected.held["state"] * (len(found) if by == "plain" else 1)


@pytest.mark.timeout(60)
def test_a_step_brings_each_parameter_once(ranks):
    for calls in ranks.run(collectives, ("sharded_optimizer", {})):
        after_backward = calls[[op for op, _ in calls].index("all_reduce") + 1 :]
        assert sum(n_bytes for op, n_bytes in after_backward if op == "broadcast") == BYTES
