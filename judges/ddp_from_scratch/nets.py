"""What do the exercises of lesson 06 train, and what comes out of one process that has all rows?

A network with what makes replicas hard: a weight in two places, a frozen one, adapters that only some rows need. The
loss of the whole batch is the mean of the ranks' losses, since every rank has as many rows. The optimizer is written
here, because every rank would have to load torch.optim first.
Read next: `causes.py`, which says what a difference means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

ADAPTERS, OUTPUTS, RATE = 3, 3, 0.1
WORLDS = ((2, 3), (3, 2), (2, 4))  # numbers of ranks for the two runs of a check
Gradients = dict[str, list | None]


class Net(nn.Module):
    """Two layers and scores; some rows go through adapters first."""

    def __init__(self, width: int, adapters: int, tied: bool):
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(width, width) for _ in range(adapters))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.scores = nn.Linear(width, OUTPUTS)
        if tied:
            self.second.weight = self.first.weight
            self.second.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, use: tuple[int, ...] = ()) -> torch.Tensor:
        for index in use:
            x = x + self.adapters[index](x)
        return self.scores(torch.tanh(self.second(torch.tanh(self.first(x)))))


@dataclass(frozen=True)
class Task:
    """A network, its data and its steps, all made from numbers."""

    width: int
    rows: int  # of each rank, in each step
    seed: int
    uses: tuple[tuple[tuple[int, ...], ...], ...]  # of each step, for each rank: the adapters that its rows need
    tied: bool = False
    adam: bool = False

    def model(self, rank: int = 0) -> Net:
        """Return the network as this rank would begin with it, in float64."""
        torch.manual_seed(self.seed + rank)
        adapters = ADAPTERS if any(any(step) for step in self.uses) else 0
        return Net(self.width, adapters, self.tied).double()

    def batch(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one rank's rows and targets for one step."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * step + rank)
        x = torch.randn(self.rows, self.width, generator=generator, dtype=torch.float64)
        return x, torch.randn(self.rows, OUTPUTS, generator=generator, dtype=torch.float64) + rank

    def loss(self, model: nn.Module, rank: int, step: int) -> torch.Tensor:
        """Return the mean loss over one rank's rows."""
        x, y = self.batch(rank, step)
        use = self.uses[step][rank]
        return ((model(x, use=use) if use else model(x)) - y).square().mean()


@dataclass(frozen=True)
class Truth:
    """What one process on the whole batch finds, and what each rank alone would."""

    gradients: list[Gradients]  # of each step
    own: list[Gradients]  # of each rank, in the first step
    weights: dict[str, list]  # at the end


def truth(task: Task, world_size: int) -> Truth:
    """Train in one process, from rank 0's start."""
    model, memory, gradients = task.model(), {}, []
    own = [_backward(model, task.loss(model, rank, 0)) for rank in range(world_size)]
    for step in range(len(task.uses)):
        mean = sum(task.loss(model, rank, step) for rank in range(world_size)) / world_size
        gradients.append(_backward(model, mean))
        descend(list(model.parameters()), memory, task.adam)
    return Truth(gradients, own, {name: p.detach().tolist() for name, p in model.named_parameters()})


def _backward(model: nn.Module, loss: torch.Tensor) -> Gradients:
    model.zero_grad()
    loss.backward()
    return gradients_of(dict(model.named_parameters()))


def gradients_of(named: dict[str, nn.Parameter]) -> Gradients:
    """Return each parameter's gradient as plain data, or None."""
    return {name: None if p.grad is None else p.grad.tolist() for name, p in named.items()}


@torch.no_grad()
def descend(parameters: list[nn.Parameter], memory: dict, adam: bool) -> None:
    """Take a step of SGD with momentum, or of Adam; a parameter without gradient is left alone."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = parameter.grad.detach()
        mean, square = memory.get(parameter, (torch.zeros_like(parameter), torch.zeros_like(parameter)))
        mean = 0.9 * mean + (0.1 if adam else 1.0) * gradient
        square = 0.99 * square + 0.01 * gradient**2
        memory[parameter] = mean, square
        parameter -= RATE * (mean / (square.sqrt() + 1e-3) if adam else mean)
