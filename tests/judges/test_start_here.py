"""Lesson 00's solutions, held to one process: their judges ask nothing but them."""

import torch
from torch import nn

from ddp_course.grading.source import function_of, solution_of
from ddp_course.grading.vocabulary import tasks


def test_the_sum_is_on_every_rank(ranks):
    total = function_of("00.1", "sum_of_all", solution_of("00.1"))
    assert [float(each) for each in ranks(3).run(lambda rank, world_size: total(rank, 3, 1.5 + rank))] == [7.5] * 3


def test_replicas_are_equal_until_one_buffer_differs(ranks):
    equal = function_of("00.2", "replicas_equal", solution_of("00.2"))

    def compared(rank, world_size):
        model = nn.BatchNorm1d(3)
        before = equal(rank, world_size, model)
        model.running_mean[1] += 2**-20 * (rank == 2)
        return before, equal(rank, world_size, model)

    assert ranks(3).run(compared) == [(True, False)] * 3


def test_two_steps_are_those_of_one_process(ranks):
    step = function_of("00.3", "parallel_step", solution_of("00.3"))

    def trained(rank, world_size):
        model = tasks.net(1, 4, 4)
        for number in range(2):
            step(rank, world_size, model, *tasks.batch(1, rank, number, 3, 4), 0.1)
        return tasks.weights(model)

    model = tasks.net(1, 4, 4)
    for number in range(2):
        whole = tuple(map(torch.cat, zip(*(tasks.batch(1, rank, number, 3, 4) for rank in range(3)), strict=True)))
        tasks.descend(model, tasks.gradient(model, whole), 0.1)
    for found in ranks(3).run(trained):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(tasks.weights(model)))
