"""Lesson 01's solutions, held to one process and to arithmetic: their judges ask nothing but them."""

import torch

from ddp_course.grading.source import function_of, solution_of
from ddp_course.grading.vocabulary import tasks

ROWS = [3, 0, 2]


def shards() -> list[tasks.Batch]:
    return [tasks.batch(1, rank, 0, rows, 4) for rank, rows in enumerate(ROWS)]


def whole() -> torch.Tensor:
    return tasks.gradient(tasks.net(1, 4, 4), tuple(map(torch.cat, zip(*shards(), strict=True))))


def test_the_shards_gradients_make_the_gradient_of_the_whole():
    function = function_of("01.1", "whole_gradient", solution_of("01.1"))
    parts = [tasks.gradient(tasks.net(1, 4, 4), shard) if len(shard[0]) else None for shard in shards()]
    torch.testing.assert_close(function(parts, ROWS), whole())


def test_the_ranks_gradient_is_that_of_one_process(ranks):
    function = function_of("01.2", "exact_gradient", solution_of("01.2"))
    given = shards()
    for found in ranks(3).run(lambda rank, world_size: function(rank, world_size, tasks.net(1, 4, 4), *given[rank])):
        torch.testing.assert_close(found, 4 * whole())  # a sum over the 4 columns, which the exercise has one of


def test_as_many_ranks_as_the_largest_shard_needs():
    function = function_of("01.3", "ranks_needed", solution_of("01.3"))
    assert function(10, "adam", 100, 10, 4 * 5 * 10 + 300) == 4  # 3 rows fit: 3 + 3 + 2 + 2
    assert function(10, "momentum", 100, 10, 4 * 4 * 10 + 1000) == 1
    assert function(10, "sgd", 100, 10, 4 * 3 * 10 + 99) is None
