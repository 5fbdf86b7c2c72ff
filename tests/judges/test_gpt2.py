"""Lesson 16's solutions, held to one process and to counting: their judges ask nothing but them."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.grading.source import function_of, solution_of
from ddp_course.grading.vocabulary import tasks
from judges.gpt2.utilisation import Small


def test_an_epoch_has_each_window_once():
    made, tokens = function_of("16.1", "TextStream", solution_of("16.1")), torch.arange(41)
    streams = [made(tokens, 5, rank, 2, seed=3) for rank in range(2)]
    for _ in range(2):
        batches = [stream.next_batch(2) for _ in range(2) for stream in streams]
        assert sorted(x[0] for inputs, _ in batches for x in inputs.tolist()) == list(range(0, 40, 5))
        assert all(torch.equal(inputs + 1, targets) for inputs, targets in batches)


@pytest.mark.parametrize("max_norm", [0.3, 1e6])
def test_the_step_is_that_of_one_process(ranks, max_norm):
    function = function_of("16.2", "train_step", solution_of("16.2"))

    def stepped(rank, world_size):
        model, batches = tasks.net(5, 3, 3), [tasks.batch(5, rank, step, 2, 3) for step in range(3)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        norm = function(DistributedDataParallel(model), optimizer, nn.functional.mse_loss, batches, max_norm)
        return norm, tasks.weights(model)

    model, batches = tasks.net(5, 3, 3), [tasks.batch(5, rank, step, 2, 3) for step in range(3) for rank in range(2)]
    gradient = tasks.gradient(model, tuple(map(torch.cat, zip(*batches, strict=True))))
    tasks.descend(model, gradient * min(1.0, max_norm / gradient.norm().item()), 0.5)
    for norm, weights in ranks(2).run(stepped):
        assert norm == pytest.approx(gradient.norm().item())
        assert weights == pytest.approx(tasks.weights(model), rel=1e-5)


def test_the_utilisation_is_counted_by_hand(ranks):
    function = function_of("16.3", "utilisation", solution_of("16.3"))

    def used(rank, world_size):
        return function(Small(1, 2, 9, 5), 1, 2, 4, 10 + rank, 1.0 + rank, 100.0)

    multiplied = 2 * 5 + 24 * 2 + 24  # tied, and a layer with its biases; not the 9 positions
    flops = 6 * multiplied + 12 * 1 * 2 * 4
    assert ranks(2).run(used) == [pytest.approx((21 / 2, flops, flops * 21 / 2 / 200))] * 2
