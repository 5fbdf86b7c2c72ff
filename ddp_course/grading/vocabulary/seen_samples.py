"""Which rows does a model see, and in which mode?

The last column of the rows has their numbers, and is no feature. So a judge can take the steps that the learner's ranks
took again, in one process and on the same rows.

Read next: `judges/failure_lab/uneven.py`, which asks whether each row is trained on once.
"""

from __future__ import annotations

import torch
from torch import nn


class Noted(nn.Module):
    """A network that notes of each forward pass: whether gradients are wanted, its mode, and the rows' numbers."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network
        self.passes: list[tuple[bool, bool, list[int]]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass the features of the rows on."""
        self.passes.append((torch.is_grad_enabled(), self.training, x[:, -1].round().int().tolist()))
        return self.network(x[:, :-1])


def numbered(x: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return rows with another column, their numbers from `first` on."""
    numbers = torch.arange(first, first + len(x), dtype=x.dtype)
    return torch.cat([x, numbers[:, None]], dim=1)
