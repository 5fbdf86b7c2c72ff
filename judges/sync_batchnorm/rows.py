"""Which rows do the ranks get, how do they travel, and what is the mistake that made these numbers of them?

A batch is made in the judge and cut into one part for each rank. Guesses are pairs: the numbers that a mistake leaves
behind, and the sentence that names it.

Shapes: N rows, C channels; x_NC stands for (N, C) or (N, C, H, W).
Read next: `statistics.py`, the first exercise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

import torch

from ddp_course.grading.compare import close, flat, short
from ddp_course.grading.exercise import Fault
from ddp_course.grading.observe import MESSAGES, Call

Guess = tuple[Any, str]
MOST_TALKS = 4  # gathering objects takes two


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


def wide(value_C: torch.Tensor, x_NC: torch.Tensor) -> torch.Tensor:
    """View a value per channel so that it fits the rows."""
    return value_C.view(1, -1, *[1] * (x_NC.dim() - 2))


def dims_of(x_NC: torch.Tensor) -> list[int]:
    """Return all dimensions but that of the channels."""
    return [dim for dim in range(x_NC.dim()) if dim != 1]


def mean_of(x_NC: torch.Tensor) -> torch.Tensor:
    """Return the mean of each channel."""
    return x_NC.mean(dims_of(x_NC))


def variance_of(x_NC: torch.Tensor, correction: int = 0) -> torch.Tensor:
    """Return the variance of each channel, divided by the count - `correction`."""
    squares_C = (x_NC - wide(mean_of(x_NC), x_NC)).square().sum(dims_of(x_NC))
    return squares_C / (x_NC.numel() // x_NC.shape[1] - correction)  # torch.var would warn of a single row


def guessed(found: Any, guesses: Iterable[Guess], tolerance: float = 1e-6) -> str:
    """Return the sentence of the first guess that made these numbers, or nothing."""
    return next((cause for numbers, cause in guesses if close(found, numbers, tolerance)), "")


def difference(name: str, found: Any, expected: torch.Tensor, rank: int, cause: str) -> Fault:
    """Return the fault of numbers that are not the expected ones; shows the first few of both."""
    numbers = flat(found)
    shown = short(numbers) if numbers is not None else short(found)
    return Fault(f"{name} {short(flat(expected))}", f"{name} {shown}", rank, cause)


def wrong_size(found: Any, expected: torch.Tensor) -> str:
    """Say so when there are more or fewer numbers than expected."""
    numbers = flat(found)
    if numbers is None:
        return "return tensors"
    if len(numbers) != expected.numel():
        return f"there are {len(numbers)} numbers, where {expected.numel()} belong: mind which dimension is summed over"
    return ""


def talks(calls: list[Call]) -> dict:
    """Return how often the ranks talked, and how many bytes this rank gave."""
    counted = [call for call in calls if call.op not in ("barrier", *MESSAGES)]
    return {"times": len(counted), "bytes": sum(call.n_bytes for call in calls)}


def talk_faults(notes: list[dict], row_bytes: int, what: str, most: int = MOST_TALKS) -> Iterator[Fault]:
    """Find ranks that talked too often, not at all, or sent rows around.

    Args:
        notes: of each rank, with "talks".
        row_bytes: of one rank's rows.
        what: the numbers that may travel, in words.
        most: collectives in one call.
    """
    for rank, note in enumerate(notes):
        times, n_bytes = note["talks"]["times"], note["talks"]["bytes"]
        if not n_bytes:
            cause = f"the ranks never talked here; {what} of all ranks make the result"
            yield Fault(f"{what} for each channel", "nothing was sent", rank, cause)
        elif n_bytes > row_bytes // 4:
            found = f"{n_bytes} bytes, where the rows themselves have {row_bytes}"
            cause = f"the rows travel; let each rank form {what} of its own rows, and send only these"
            yield Fault(f"{what} for each channel, and no rows", found, rank, cause)
        elif times > most:
            cause = "one collective for each channel or number; stack them into one tensor, and send it at once"
            yield Fault(f"at most {most} collectives", f"{times} collectives", rank, cause)
