"""The solutions of lesson 17 are held to the paper's figures and to one process of torch."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

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


def model() -> nn.Sequential:
    torch.manual_seed(0)
    parts = {"start": nn.Linear(3, 5), "blocks": nn.Sequential(nn.Linear(5, 5), nn.Tanh()), "head": nn.Linear(5, 2)}
    return nn.Sequential(OrderedDict(parts)).double()


def sharded(rank: int, world_size: int, x: torch.Tensor, y: torch.Tensor) -> tuple[list[float], dict]:
    mesh = init_device_mesh("cpu", (world_size,))
    training = answer("17.3", "ShardedTraining")(model(), mesh, 0.1, 1.0)
    norms = [training.step(x.chunk(world_size)[rank], y.chunk(world_size)[rank]) for _ in range(3)]
    return norms, training.full_state()


def test_17_3_is_one_process_that_clips_and_saves(ranks):
    x, y = torch.randn(4, 3, dtype=torch.float64), 4 * torch.randn(4, 2, dtype=torch.float64)
    one, norms = model(), []
    adam = torch.optim.Adam(one.parameters(), lr=0.1)
    for _ in range(3):
        adam.zero_grad()
        nn.functional.mse_loss(one(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(one.parameters(), 1.0).item())
        adam.step()
    (found, state), (others, nothing) = ranks(2).run(sharded, args=(x, y))
    assert found == others == pytest.approx(norms) and max(norms) > 1 and nothing == {}
    torch.testing.assert_close(state, dict(one.state_dict()))
