"""What do the exercises of lesson 06 train, and what comes out of one process that has all rows?

A network with what makes replicas hard: a weight in two places, a frozen one, adapters that only some rows need. The
loss of the whole batch is the mean of the ranks' losses, since every rank has as many rows. The optimizer is written
here, because every rank would have to load torch.optim first. A gradient that is None is noted as [].
Read next: `average.py`, which says what a difference means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

ADAPTERS, OUTPUTS, RATE = 3, 3, 0.1
TOLERANCE = 1e-9
WORLDS = ((2, 3), (3, 2), (2, 4))  # numbers of ranks for the two runs of a check
Values = dict[str, list[float]]  # by parameter


class Net(nn.Module):
    """Two layers and scores; some rows go through adapters first. If tied, a bias is frozen, too."""

    def __init__(self, width: int, adapters: int, tied: bool):
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(width, width) for _ in range(adapters))
        self.scores = nn.Linear(width, OUTPUTS)  # used last, so backward does not go through them in reverse order
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        if tied:
            self.second.weight = self.first.weight
            self.second.bias.requires_grad_(False)
        self.register_buffer("offset", torch.randn(OUTPUTS))
        self.register_buffer("seen", torch.randn(2), persistent=False)  # in no state_dict

    def forward(self, x: torch.Tensor, use: tuple[int, ...] = (), *, named: bool = False) -> Any:
        for index in use:
            x = x + self.adapters[index](x)
        scores = self.scores(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return {"scores": scores + self.offset} if named else scores


@dataclass(frozen=True)
class Task:
    """A network, its data and its steps, all made from numbers."""

    width: int
    rows: int  # of each rank, in each step
    seed: int
    uses: tuple[tuple[tuple[int, ...], ...], ...]  # of each step, for each rank: the adapters that its rows need
    tied: bool = False
    adam: bool = False
    blank: tuple[tuple[int, int], ...] = ()  # step and rank where rows are 0, and so are the first weights' gradients
    thrice: int = -1  # a step of three passes, each for a third of the loss, where each rank also has others' adapters

    def model(self, rank: int = 0) -> Net:
        """Return the network as this rank would begin with it, in float64."""
        torch.manual_seed(self.seed + rank)
        return Net(self.width, ADAPTERS if any(map(any, self.uses)) else 0, self.tied).double()

    @property
    def n_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(p.nbytes for p in self.model().parameters() if p.requires_grad)

    def losses(self, model: nn.Module, rank: int, step: int) -> Iterator[torch.Tensor]:
        """Yield the loss of each pass; their sum is the mean over one rank's rows."""
        passes = 3 if step == self.thrice else 1
        for number in range(passes):
            yield self.loss(model, rank, step, number) / passes

    def loss(self, model: nn.Module, rank: int, step: int, number: int = 0) -> torch.Tensor:
        """Return the mean loss over one rank's rows, in this pass of the step."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * step + rank)
        x, y = (torch.randn(self.rows, n, generator=generator, dtype=torch.float64) for n in (self.width, OUTPUTS))
        uses = self.uses[step]
        use, x = uses[(rank + number) % len(uses)], x * ((step, rank) not in self.blank)
        return ((model(x, use=use) if use else model(x)) - y - rank).square().mean()

    def train(self, model: nn.Module, backward: Callable[[int], None]) -> list[Values]:
        """Take each step after `backward(step)`, by SGD with momentum or Adam; return the gradients of all.

        A parameter without gradient is left alone.
        """
        found, memory = [], {}
        for step in range(len(self.uses)):
            model.zero_grad()
            backward(step)
            found.append(gradients_of(model))
            for p in (p for p in model.parameters() if p.grad is not None):
                mean, square = memory.get(p, (0, 0))
                mean, square = 0.9 * mean + (0.1 if self.adam else 1.0) * p.grad, 0.99 * square + 0.01 * p.grad**2
                memory[p] = mean.detach(), square.detach()
                p.data -= RATE * (mean / (square.sqrt() + 1e-3) if self.adam else mean).detach()
        return found


@lru_cache(4)
def one_process(task: Task, world_size: int) -> tuple[list[Values], list[list[Values]], Values]:
    """Return the gradients of each step, those of each rank's rows alone, and the weights in the end."""
    model, alone = task.model(), []

    def backward(step: int) -> None:
        losses = [sum(task.losses(model, rank, step)) for rank in range(world_size)]
        alone.append([])
        for loss in losses:
            model.zero_grad()
            loss.backward(retain_graph=True)
            alone[-1].append(gradients_of(model))
        model.zero_grad()
        (sum(losses) / world_size).backward()

    return task.train(model, backward), alone, weights_of(model)


def gradients_of(model: nn.Module) -> Values:
    """Return each parameter's gradient, [] where it is None."""
    return {n: [] if p.grad is None else p.grad.flatten().tolist() for n, p in model.named_parameters()}


def weights_of(model: nn.Module) -> Values:
    """Return each parameter's values."""
    return {name: p.detach().flatten().tolist() for name, p in model.named_parameters()}
