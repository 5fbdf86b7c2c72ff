"""Small models and rows that judges train: the same on every rank that names the same seed, in float64.

One process that has every rank's rows is the reference: it adds up gradients as flat vectors, so that a mistake is a
line of arithmetic. Shapes: P all parameters of a model, in order.

Read next: `judges/gpt2/step.py`, one step of several micro-batches, rightly and with each known mistake.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets


def net(seed: int, *widths: int) -> nn.Sequential:
    """Return a network of linear layers with tanh between them."""
    torch.manual_seed(seed)
    layers = (m for a, b in zip(widths, widths[1:], strict=False) for m in (nn.Linear(a, b), nn.Tanh()))
    return nn.Sequential(*layers)[:-1].double()


def batch(seed: int, rank: int, step: int, rows: int, width: int) -> Batch:
    """Return one rank's rows of one step; the ranks' targets, and so their gradients, differ in size."""
    generator = torch.Generator().manual_seed(1000 * seed + 100 * step + rank)
    x = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return x, 2 * x.flip(1) + 3 * rank


def gradient(model: nn.Module, given: Batch, loss: Callable = nn.functional.mse_loss) -> torch.Tensor:
    """Return the gradient of the loss of some rows, (P,)."""
    found = torch.autograd.grad(loss(model(given[0]), given[1]), list(model.parameters()))
    return torch.cat([part.flatten() for part in found])


def weights(model: nn.Module) -> list[float]:
    """Return all parameters as plain data, (P,)."""
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


@torch.no_grad()
def descend(model: nn.Module, gradient_P: torch.Tensor, rate: float) -> None:
    """Take a step of plain SGD."""
    vector = nn.utils.parameters_to_vector(model.parameters()) - rate * gradient_P
    nn.utils.vector_to_parameters(vector, model.parameters())
