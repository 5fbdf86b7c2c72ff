"""Whose numbers are in a result?

Rank r brings d * base^r, with d from 1 to 4. So each rank has digits of its own in any sum, and a wrong sum tells which
ranks are in it, and how often: where 3 and 200 were brought, 403 has rank 1's number twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

BASE = 100


def stakes(rng: Random, world_size: int, n: int, base: int = BASE) -> list[list[int]]:
    """Return for each rank `n` numbers that tell whose they are."""
    return [[rng.randint(1, 4) * base**rank for _ in range(n)] for rank in range(world_size)]


def counts(found: float, brought: Sequence[int], base: int = BASE) -> list[int] | None:
    """Return how often each rank's number is in a sum; None when it is no such sum.

    Args:
        brought: each rank's number, of `stakes`, at this place.
    """
    often, rest = [], found
    for rank, value in enumerate(brought):
        digits = rest % base ** (rank + 1)
        if digits % value:
            return None
        often.append(int(digits // value))
        rest -= digits
    return often if rest == 0 else None


def whose(found: float, brought: Sequence[int], base: int = BASE) -> str:
    """Say which ranks' numbers are missing in a sum, or are in it more than once; nothing if it cannot be told."""
    often = counts(found, brought, base)
    if often is None or set(often) == {1}:
        return ""
    said = {0: "is missing", 1: ""}
    told = [(rank, said.get(times, f"is in it {times} times")) for rank, times in enumerate(often)]
    return ", ".join(f"rank {rank}'s number {words}" for rank, words in told if words)
