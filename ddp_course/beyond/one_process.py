"""What must every strategy come out at?

One process, all rows, the plain optimizer: that is the run which each strategy of this folder has to repeat. They all
train the same way, with Adam on the mean cross-entropy, and report the same: the losses, the parameters at the end, and
the bytes that one rank held. So any two of them can be laid side by side.

Left out on purpose: activations, which `memory.py` counts; and any strategy.
Read next: `sharded_optimizer.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Trained:
    """What a run of some steps leaves, as one rank tells it."""

    losses: tuple[float, ...]  # of the whole batch, before each step
    parameters: dict[str, torch.Tensor]  # by name, whole, at the end
    held: dict[str, int]  # bytes on this rank of "parameters", "gradients" and "state", between two steps


def train_steps(model: nn.Module, x_NF: torch.Tensor, y_N: torch.Tensor, steps: int = 5, lr: float = 0.01) -> Trained:
    """Train a copy of `model` in this process alone, each step on all N rows.

    Args:
        x_NF, y_N: the rows and their classes.
    Collective: none.
    """
    model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x_NF), y_N)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(tuple(losses), whole_parameters(model), bytes_held(model.parameters(), optimizer))


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters on the CPU, by name."""
    return {name: param.detach().clone().cpu() for name, param in model.named_parameters()}


def bytes_held(params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Count the bytes that this rank holds; of a sharded tensor, its own part."""
    params = list(params)
    return {
        "parameters": sum(map(_local_bytes, params)),
        "gradients": sum(_local_bytes(param.grad) for param in params if param.grad is not None),
        "state": state_bytes(optimizer),
    }


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Count the bytes of the tensors in an optimizer's state on this rank, its step counters included."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(_local_bytes(value) for value in values if isinstance(value, torch.Tensor))


def my_rows(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return this rank's share of the rows.

    Raises:
        ValueError: the shares would not be equal, so that the mean of the ranks' means was not the mean of all rows.
    """
    if len(tensor) % world_size:
        raise ValueError(
            f"rank {rank}: {len(tensor)} rows cannot be shared equally by {world_size} ranks; take a multiple of "
            f"{world_size}, for the mean of the ranks' losses to be the mean over all rows"
        )
    return tensor.chunk(world_size)[rank]


def _local_bytes(tensor: torch.Tensor) -> int:
    to_local = getattr(tensor, "to_local", None)  # a DTensor's: the part that lives here
    return (to_local() if to_local else tensor).nbytes
