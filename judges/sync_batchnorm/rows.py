"""Which rows do the ranks get, and what is expected of numbers that stand for the channels of all of them?

A case holds one part of a batch for each rank.

Shapes: N rows, C channels; x_NC stands for (N, C) or (N, C, H, W).
Read next: `statistics.py`, the first exercise.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import flat
from ddp_course.grading.vocabulary.expect import Expect, Slips, all_of, equals
from ddp_course.grading.vocabulary.play import Seen

NOT_A_NUMBER = (
    "nan: the mean of no rows is nan, the variance of one row divided by its count - 1 too, and nan times 0 stays nan; "
    "let a rank without rows send zeros, and divide by the count"
)


def batch(rng: Random, sizes: list[int], shape: tuple[int, ...], offset: float = 0.0) -> list[torch.Tensor]:
    """Return one part for each rank, in float64.

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


def wide(value_C: torch.Tensor, x_NC: torch.Tensor) -> torch.Tensor:
    """View a value per channel so that it fits the rows."""
    return value_C.view(1, -1, *[1] * (x_NC.dim() - 2))


def mean_of(x_NC: torch.Tensor) -> torch.Tensor:
    """Return the mean of each channel."""
    return x_NC.double().movedim(1, -1).flatten(0, -2).mean(0)


def variance_of(x_NC: torch.Tensor, correction: int = 0) -> torch.Tensor:
    """Return the variance of each channel, divided by the count - `correction`."""
    rows_NC = x_NC.double().movedim(1, -1).flatten(0, -2)  # torch.var would warn of a single row
    return (rows_NC - rows_NC.mean(0)).square().sum(0) / (len(rows_NC) - correction)


def numbers(
    name: str, right: Callable[[Seen], torch.Tensor], slips: Slips, otherwise: str, of: Any, tolerance: float = 1e-9
) -> Expect:
    """Expect the reference's numbers in its shape, as `equals`; say so where they are more or fewer, or none."""

    def why(seen: Seen, found: Any) -> str:
        ours, belong = flat(found), right(seen).numel()
        if ours is None:
            return f"return a tensor as {name}"
        if len(ours) != belong:
            return f"there are {len(ours)} numbers, where {belong} belong: mind which dimension is summed over"
        return NOT_A_NUMBER if any(number != number for number in ours) else otherwise

    def shaped(seen: Seen) -> Fault | None:
        found, wanted = seen[of] if isinstance(of, str) else of(seen), right(seen)
        if flat(found) is None or len(flat(found)) != wanted.numel() or not wanted.numel():
            return None  # told by the numbers
        shapes = [list(torch.as_tensor(value).shape) for value in (found, wanted)]
        cause = "the numbers are right, their shape is another one"
        return None if shapes[0] == shapes[1] else Fault(f"{name} of shape {shapes[1]}", f"{shapes[0]}", cause=cause)

    plainly = {"of": of, "tolerance": tolerance, "shown": lambda found: found if flat(found) is None else flat(found)}
    return all_of(equals(name, right, slips, why, **plainly), shaped)
