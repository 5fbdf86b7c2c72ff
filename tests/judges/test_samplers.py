"""Lesson 05's solutions, held to one process and to counting: their judges ask nothing but them."""

import torch
from torch.utils.data import WeightedRandomSampler

from ddp_course.grading.source import function_of, solution_of


def test_the_order_is_padded_or_cut_and_shared():
    made = function_of("05.1", "MySampler", solution_of("05.1"))
    order = list(made(10, 1, 0, seed=3))
    assert sorted(order) == list(range(10)) != order
    for drop_last, dealt in ((False, order + order[:2]), (True, order[:8])):
        samplers = [made(10, 4, rank, 3, drop_last) for rank in range(4)]
        assert [list(each) for each in samplers] == [dealt[rank::4] for rank in range(4)]
        assert {len(each) for each in samplers} == {len(dealt) // 4}
    samplers[0].set_epoch(1)
    assert list(samplers[0]) != order[:8:4]


def test_the_accuracy_is_that_of_one_process(ranks):
    function = function_of("05.2", "accuracy", solution_of("05.2"))

    def evaluated(rank, world_size):
        return function(rank, world_size, lambda rows: rows[:, 0] > 4, torch.arange(7.0)[:, None], torch.ones(7))

    assert [float(each) for each in ranks(3).run(evaluated)] == [2 / 7] * 3


def test_an_epoch_is_resumed_on_other_ranks():
    made = function_of("05.4", "Resumable", solution_of("05.4"))
    order, trained = list(made(20, 1, 0, seed=3)), []
    state = {"epoch": 0, "consumed": 0}
    for ranks in (4, 3, 2):
        samplers = [made(20, ranks, rank, seed=3) for rank in range(ranks)]
        for each in samplers:
            each.load_state_dict(state)
        trained += [list(each)[:2] for each in samplers]
        samplers[0].advance(2)
        state = samplers[0].state_dict()
    assert sorted(order) == list(range(20))
    assert sorted(sum(trained, [])) == sorted(order[:18])


def test_the_ranks_share_torchs_weighted_draw():
    made = function_of("05.3", "MyWeightedSampler", solution_of("05.3"))
    weights, generator = [0, 1, 2.5, 30], torch.Generator().manual_seed(3 + 2)
    order = list(WeightedRandomSampler(weights, 11, generator=generator))
    samplers = [made(weights, 11, 3, rank, seed=3) for rank in range(3)]
    for each in samplers:
        each.set_epoch(2)
    assert [list(each) for each in samplers] == [order[rank:9:3] for rank in range(3)]
    assert {len(each) for each in samplers} == {3}
