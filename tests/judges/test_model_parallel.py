"""The solution of lesson 18 is held to the whole layers in one process of torch."""

import torch
from torch import nn

from ddp_course.grading.source import function_of, solution_of


def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(3, 4).double(), nn.Linear(4, 5).double()]


def cut(rank: int, world_size: int) -> list[torch.Tensor]:
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_()
    model = function_of("18.1", "CutLayers", solution_of("18.1"))(rank, world_size, *layers())
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, model.second_weight.grad, model.second_bias.grad]


def test_18_1_is_the_whole_layers_and_their_gradients(ranks):
    x, (first, second) = torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_(), layers()
    output = second(torch.tanh(first(x)))
    output.square().sum().backward()
    for rank, found in enumerate(ranks(2).run(cut)):
        torch.testing.assert_close(
            found, [output.detach(), x.grad, second.weight.grad.chunk(2, 1)[rank], second.bias.grad]
        )
