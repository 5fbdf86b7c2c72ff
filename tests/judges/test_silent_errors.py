"""Lesson 13's solutions, held to one process and to planted errors: their judges ask nothing but them."""

import pytest
import torch
from torch.nn.functional import softplus

from ddp_course.grading.source import function_of, solution_of
from ddp_course.grading.vocabulary import tasks
from judges.silent_errors.forwards import RATE, Critic, samples


def test_the_critic_has_the_weights_of_one_process(ranks):
    function = function_of("13.1", "train_critic", solution_of("13.1"))

    def trained(rank, world_size):
        torch.manual_seed(5)
        critic = Critic()
        function(rank, world_size, critic, *samples(5, 3, rank), RATE)
        return tasks.weights(critic)

    torch.manual_seed(5)
    critic, everyone = Critic(), [samples(5, 3, rank) for rank in range(3)]
    optimizer = torch.optim.SGD(critic.parameters(), lr=RATE)
    for step in range(3):
        x, z = (torch.cat([kinds[kind][step] for kinds in everyone]) for kind in (0, 1))
        optimizer.zero_grad()
        (softplus(-critic(x)).mean() + softplus(critic(z)).mean()).backward()
        optimizer.step()
    assert ranks(3).run(trained) == [pytest.approx(tasks.weights(critic), rel=1e-9)] * 3


def test_the_check_finds_what_was_planted(ranks):
    function = function_of("13.2", "compare_ranks", solution_of("13.2"))

    def compared(rank, world_size):
        weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, 2.0 + 2**-22 * (rank == 2)])}
        return function(rank, world_size, [rank, rank + 3, 2 * rank], weights)

    assert ranks(3).run(compared) == [([0, 2, 4], ["b"])] * 3
