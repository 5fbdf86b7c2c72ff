"""Which rows do the ranks of lesson 08 get? A case holds one part of a batch for each rank, all in float64.

Shapes: N rows, C channels; x_NC stands for (N, C) or (N, C, H, W).
Read next: `statistics.py`, the first exercise.
"""

from __future__ import annotations

from random import Random

import torch

NOT_ACCEPTED = (
    *("torch.nn.SyncBatchNorm", "ddp_course.parallel.syncbn.SyncBatchNorm"),
    "ddp_course.parallel.syncbn._wide",  # called by the heart of the course's own
)


def batch(rng: Random, sizes: list[int], shape: tuple[int, ...], offset: float = 0.0) -> list[torch.Tensor]:
    """Return one part for each rank.

    Every channel has its own mean and spread, and so has every rank: whatever is averaged wrongly shows.

    Args:
        sizes: rows of each rank.
        shape: of one row: (C,) or (C, H, W).
        offset: added to all numbers.
    """
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    channels = (shape[0], *[1] * (len(shape) - 1))

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    means, spreads = drawn(*channels), 0.5 + torch.rand(channels, generator=generator, dtype=torch.float64)
    return [
        offset + means + 1.5 * rank + drawn(*channels) + (1 + 0.4 * rank) * spreads * drawn(size, *shape)
        for rank, size in enumerate(sizes)
    ]


def unequal(rng: Random, world_size: int, least: int = 3) -> list[int]:
    """Return a number of rows for each rank, no two alike."""
    sizes = [least + 2 * index + rng.randint(0, 1) for index in range(world_size)]
    rng.shuffle(sizes)
    return sizes


def affine(rng: Random, channels: int) -> torch.Tensor:
    """Return a weight and a bias, (2, C)."""
    return torch.tensor([[rng.uniform(0.5, 2) for _ in range(channels)] for _ in range(2)], dtype=torch.float64)
