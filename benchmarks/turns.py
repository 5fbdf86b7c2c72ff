"""How are ways to do the same thing compared, case by case?

The ways take turns in blocks, in an order drawn again for each block and the same on every rank. A block's time is that
of its slowest rank. A ratio is formed within one block, between neighbours in time, so that a slow minute of the
machine falls on both.

Read next: `ddp.py`, a comparison.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import torch

from benchmarks.measure import Plan, Row, attempt, refuse_unknown, show_progress
from ddp_course import RankPool

T = TypeVar("T")
Seconds = dict[str, list[float]]  # by way, for each block


def in_turns(ways: Iterable[str], blocks: int, take: Callable[[str], T]) -> dict[str, list[T]]:
    """Return what `take` gives for each way, once a block."""
    found: dict[str, list[T]] = {way: [] for way in ways}
    rng = random.Random(0)
    for _ in range(blocks):
        for way in rng.sample(list(found), len(found)):
            found[way].append(take(way))
    return found


def run_on_ranks(fn: Callable[..., T], world_size: int, *args: object, backend: str | None = "gloo") -> list[T]:
    """Return what `fn(rank, world_size, *args)` returns on each of `world_size` quiet ranks; see `RankPool`."""
    with RankPool(world_size, backend=backend, start_method="forkserver", quiet=True) as ranks:
        return ranks.run(fn, args)


def slowest(by_rank: list[Seconds]) -> Seconds:
    """Return the slowest rank's seconds of each block."""
    return {way: [max(block) for block in zip(*(each[way] for each in by_rank), strict=True)] for way in by_rank[0]}


def quotients(above: list[float], below: list[float]) -> list[float]:
    """Divide block by block."""
    return [a / b for a, b in zip(above, below, strict=True)]


def beside(base: str, ways: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the ratios of all other ways to `base`."""
    return {way: (way, base) for way in ways if way != base}


@dataclass(frozen=True)
class Comparison:
    """Ways that take turns in each of some cases.

    Args:
        name: the benchmark's.
        ways: what the table calls each.
        ratios: the way above and the way below, by the first part of a row's key.
        cases: the last part of a row's key.
        limit_s: for all blocks of one case.
    """

    name: str
    ways: dict[str, str]
    ratios: dict[str, tuple[str, str]]
    cases: Iterable[str]
    limit_s: float

    def rows(self, world_size: int) -> list[Row]:
        rows = []
        for case in self.cases:
            rows += [Row(f"{way}_{case}", f"{label}, {case}", world_size) for way, label in self.ways.items()]
            rows += [
                Row(f"{key}_ratio_{case}", f"{self.ways[above]} / {self.ways[below]}, {case}", world_size, unit="")
                for key, (above, below) in self.ratios.items()
            ]
        return rows

    def fill(self, rows: dict[str, Row], case: str, by_rank: list[Seconds]) -> None:
        """Turn the ranks' seconds into the samples of one case."""
        seconds = slowest(by_rank)
        for way in self.ways:
            rows[f"{way}_{case}"].samples += seconds[way]
        for key, (above, below) in self.ratios.items():
            rows[f"{key}_ratio_{case}"].samples += quotients(seconds[above], seconds[below])

    def measure(self, plan: Plan, world_sizes: Iterable[int], timed: Callable[[int, str], list[Seconds]]) -> list[Row]:
        """Return the rows that `plan` wants, filled with what `timed(world_size, case)` returns of each rank."""
        refuse_unknown(self.name, plan, self.rows(1))
        rows = [row for world_size in world_sizes for row in self.rows(world_size)]
        for world_size, case in product(world_sizes, self.cases):
            mine = {row.key: row for row in rows if row.ranks == world_size and row.key.endswith(f"_{case}")}
            if any(map(plan.wants, mine)):
                show_progress(f"{self.name}: {world_size} ranks, {case}")
                with attempt(mine.values(), case, self.limit_s):
                    self.fill(mine, case, timed(world_size, case))
        return [row for row in rows if plan.wants(row.key)]


def clock(device: torch.device) -> float:
    """Return the time in seconds, when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
