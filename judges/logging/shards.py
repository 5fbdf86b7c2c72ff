"""Unequal shards for the exercises of lesson 09.

Losses have multiples of 1/1024 as values, so that a sum in float32 or float64, in any order, is the same number.
Read next: `mean.py`.
"""

from __future__ import annotations

from random import Random

import torch

SAME = 1e-5  # of the expected number: what float32 may leave

SKIPPED = {
    "absent|cut-off|disagree; limit: waited in": "one rank skips a collective that the "
    "others wait in; every rank must join, the ranks without rows too, so no collective below `if rank == 0` or "
    "`if len(...)`"
}


def unequal(rng: Random, parts: int, least: int, step: int = 7) -> list[int]:
    """Return sizes that all differ, in any order, so that weights and places matter."""
    sizes = [least + index * step + rng.randrange(step) for index in range(parts)]
    sizes[rng.randrange(parts)] += 2 * least  # one part is far larger, so that wrong weights show
    rng.shuffle(sizes)
    return sizes


def losses(rng: Random, rows: int) -> torch.Tensor:
    """Return one loss for each row, in a range that differs from call to call: then means differ, too."""
    least = rng.randrange(100, 2050)
    return torch.tensor([rng.randrange(least, 4000) / 1024 for _ in range(rows)], dtype=torch.float32)
