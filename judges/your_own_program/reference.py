"""What does one process get, and what would it get with one of the usual mistakes?

The same training as `ONE_DEVICE`'s, on whole batches, with knobs to turn; nothing of a learner's is used.
Read next: `convert.py`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

BATCH, ROWS, TESTS = 48, 480, 101


@lru_cache(maxsize=64)
def trained(
    epochs: int,
    seed: int,
    *,
    one_order: bool = False,
    batch: int = BATCH,
    of_rank: int | None = None,
    world_size: int = 1,
    forgets_at: int = 0,
) -> list[tuple[list[float], list[torch.Tensor], list[torch.Tensor]]]:
    """Return of each epoch the weights, the losses of the rows, by rank, and the errors of the test rows.

    Args:
        one_order: every epoch has the order of the first.
        of_rank: train on this rank's rows alone.
        forgets_at: the momentum begins again at this epoch.
    """
    x, y = _data(ROWS, seed)
    test_x, test_y = _data(TESTS, seed + 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    told = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        if forgets_at and epoch == forgets_at:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0 if one_order else epoch))
        losses = torch.zeros(ROWS)
        if of_rank is not None:
            order = order[of_rank::world_size]
        for rows in order.split(batch // (1 if of_rank is None else world_size)):
            each = (model(x[rows]) - y[rows]).square()
            losses[rows] = each.detach()[:, 0]
            optimizer.zero_grad()
            each.mean().backward()
            optimizer.step()
        state = model.state_dict()
        weights = [number for name in sorted(state) for number in state[name].flatten().tolist()]
        shards = [losses[order[rank::world_size]] for rank in range(world_size)] if of_rank is None else [losses[order]]
        with torch.no_grad():
            errors = (model(test_x) - test_y).abs()[:, 0]
        told.append((weights, shards, [errors[rank::world_size] for rank in range(world_size)]))
    return told


def _data(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :1] + x[:, 1:2] * x[:, 2:3]
