"""Does FSDP2 come out where one process does, and is it sharded when it says so?"""

from __future__ import annotations

import pytest

from ddp_course.beyond import fully_sharded
from tests.beyond.strategies_on_ranks import TOLERANCE, alone, collectives, network, off_by, rows, trained

WHOLE = {str(index): sum(p.nbytes for p in network()[index].parameters()) for index in (0, 2, 4, 6)}


def pieces(rank: int, world_size: int) -> dict[str, int]:
    """Bytes of each layer that a rank keeps: dimension 0 in chunks of equal size, the last ones smaller or empty."""
    found = {}
    for name in WHOLE:
        chunks = [p.chunk(world_size) for p in network()[int(name)].parameters()]
        found[name] = sum(chunk[rank].nbytes for chunk in chunks if rank < len(chunk))
    return found


def watched(rank: int, world_size: int, reshard: bool) -> list:
    """What was held when in one step."""
    model = network()
    return fully_sharded.watch_step(model, fully_sharded.shard_layers(model, reshard), *rows())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("reshard", [True, False])
def test_training_is_that_of_one_process_and_of_ddp(ranks, reshard):
    expected = alone()
    for one in ranks.run(trained, ("fully_sharded", {"reshard_after_forward": reshard})):
        assert off_by(one, expected) < TOLERANCE
    ddp = ranks.run(trained, ("sharded_optimizer", {"by": "plain"}))[0]
    assert off_by(one, ddp) < TOLERANCE


@pytest.mark.timeout(60)
def test_a_rank_holds_its_pieces_of_everything(ranks):
    found = ranks.run(trained, ("fully_sharded", {}))
    for rank, one in enumerate(found):
        mine = sum(pieces(rank, len(found)).values())
        counters = 4 * len(list(network().parameters()))
        assert one.held == {"parameters": mine, "gradients": mine, "state": 2 * mine + counters}
    assert sum(one.held["parameters"] for one in found) == sum(WHOLE.values())


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_layer_is_whole_only_while_it_computes(ranks, reshard):
    found = ranks.run(watched, (reshard,))
    names = list(WHOLE)
    for rank, seen in enumerate(found):
        mine = pieces(rank, len(found))

        def held(*whole, mine=mine):
            return sum(WHOLE[name] if name in whole else mine[name] for name in WHOLE)

        forward = [(f"forward of {n}", held(*([n] if reshard else names[: i + 1]))) for i, n in enumerate(names)]
        backward = [(f"backward of {n}", held(*([n] if reshard else names[: i + 1]))) for i, n in enumerate(names)]
        between = ("between", held() if reshard else held(*names))
        assert seen == [("before", held()), *forward, between, *backward[::-1], ("after", held())]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reshard", [True, False])
def test_the_collectives_of_a_step(ranks, reshard):
    found = ranks.run(collectives, ("fully_sharded", {"reshard_after_forward": reshard}))
    for calls in found:
        step = [op for op, _ in calls[: [op for op, _ in calls].index("all_reduce")]]
        expected = fully_sharded.expected_collectives(len(WHOLE), reshard)
        assert {op: step.count(op) for op in expected} == expected
        assert len(step) == sum(expected.values())
