"""The solutions of lesson 17 are held to the paper's figures and to one process of torch."""

import pytest
import torch
from torch import nn

from ddp_course.grading.source import function_of, solution_of


def answer(exercise: str, name: str):
    return function_of(exercise, name, solution_of(exercise))


@pytest.mark.parametrize(("strategy", "gb"), [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)])
def test_17_1_is_figure_1_of_the_zero_paper(strategy, gb):
    held = answer("17.1", "bytes_on_a_rank")(7_500_000_000, 64, strategy, True)
    assert sum(held.values()) / 1e9 == pytest.approx(gb, abs=0.05)


def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(3, 4).double(), nn.Linear(4, 5).double()]


def stepped(rank: int, world_size: int) -> list[torch.Tensor]:
    """Three steps of torch's Adam, dealt by the solution, or in one process where there is one rank."""
    params = [parameter for layer in layers() for parameter in layer.parameters()]
    adam = torch.optim.Adam(params) if world_size == 1 else None
    adam = adam or answer("17.2", "ShardedStep")(rank, world_size, params, lambda chosen: torch.optim.Adam(chosen))
    for _ in range(3):
        for number, parameter in enumerate(params):
            parameter.grad = torch.full_like(parameter, number - 1.5)
        adam.step()
    return [parameter.detach() for parameter in params]


def test_17_2_steps_as_torchs_adam_in_one_process(ranks):
    for found in ranks(2).run(stepped):
        for ours, right in zip(found, stepped(0, 1), strict=True):
            assert torch.equal(ours, right)
