"""How long do the course's ring and tree take beside torch's own all_reduce?

All three sum the same float32 tensor over gloo on loopback, on ranks that stay alive. They take turns in blocks of
calls, in an order drawn anew and the same on every rank. A block's time is that of its slowest rank. A ratio is formed
within one block, between neighbours in time, so that a slow minute of the machine falls on both.

Left out on purpose: a real network, where latency and bandwidth are others, and so is the crossover.
Read next: `measure.py`, what is made of the samples.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.measure import Plan, Result, Row, limit
from ddp_course import RankError, RankPool
from ddp_course.collectives import ring_all_reduce, tree_all_reduce

TITLE = "One all-reduce of float32 tensors: the course's ring and tree beside torch's"
NOTES = [
    "Seconds of the slowest rank, per call. A ratio is that of two ways within one block of calls.",
    "With more ranks than cores, ranks take turns, and whoever needs most steps waits most: the ring, at small sizes.",
]
SIZES = {"4kB": 4_000, "1MB": 1_000_000, "16MB": 16_000_000}  # bytes
CALLS = {"4kB": 50, "1MB": 8, "16MB": 2}  # in a block
BLOCKS, QUICK_BLOCKS = 11, 3
LIMIT_S = 240.0  # for all blocks of one size
WAYS: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {
    "all_reduce": ("dist.all_reduce", dist.all_reduce),
    "ring": ("ring_all_reduce", ring_all_reduce),
    "tree": ("tree_all_reduce", tree_all_reduce),
}


def timed_blocks(rank: int, world_size: int, numel: int, calls: int, blocks: int) -> dict[str, list[float]]:
    """Return this rank's seconds per call, by way, for each block.

    Collective: one barrier and `calls` all-reduces per block and way, and one checked all-reduce per way before.
    """
    for name, (_, way) in WAYS.items():
        tensor = torch.full((numel,), rank + 1.0)
        way(tensor)
        expected = world_size * (world_size + 1) / 2
        if not bool((tensor == expected).all()):
            raise RuntimeError(f"rank {rank}: {name} gave {tensor.unique().tolist()[:3]}, expected {expected}")
    tensor = torch.zeros(numel)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    rng = random.Random(numel)  # the same order on every rank
    for _ in range(blocks):
        for name in rng.sample(list(WAYS), len(WAYS)):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                WAYS[name][1](tensor)
            seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def measure(plan: Plan) -> Result:
    """Time the three ways for every size and number of ranks that `plan` wants."""
    known = {row.key for row in empty_rows(2)}
    if unknown := plan.only - known:
        sys.exit(f"collectives has no row {', '.join(sorted(unknown))}; choose from {', '.join(sorted(known))}")
    rows = [row for world_size in plan.world_sizes for row in empty_rows(world_size)]
    for world_size in plan.world_sizes:
        mine = {row.key: row for row in rows if row.ranks == world_size}
        sizes = [size for size in SIZES if any(plan.wants(key) for key in mine if key.endswith(f"_{size}"))]
        try:
            with RankPool(world_size, backend="gloo", start_method="forkserver", quiet=True) as ranks:
                for size in sizes:
                    print(f"collectives: {world_size} ranks, {size}", file=sys.stderr, flush=True)
                    plan_of_size = (SIZES[size] // 4, CALLS[size], QUICK_BLOCKS if plan.quick else BLOCKS)
                    with limit(LIMIT_S, f"{size} on {world_size} ranks"):
                        fill(mine, size, ranks.run(timed_blocks, plan_of_size))
        except (RankError, TimeoutError) as error:
            for row in mine.values():
                row.failed = "" if row.samples else f"{type(error).__name__}: {error}"
    return Result(TITLE, [row for row in rows if plan.wants(row.key)], notes=NOTES)


def empty_rows(world_size: int) -> list[Row]:
    rows = []
    for size in SIZES:
        rows += [Row(f"{key}_{size}", f"{label}, {size}", world_size) for key, (label, _) in WAYS.items()]
        rows += [
            Row(f"{key}_ratio_{size}", f"{label} / {WAYS['all_reduce'][0]}, {size}", world_size, unit="")
            for key, (label, _) in WAYS.items()
            if key != "all_reduce"
        ]
    return rows


def fill(rows: dict[str, Row], size: str, by_rank: list[dict[str, list[float]]]) -> None:
    """Turn the ranks' seconds into the samples of one size: the slowest rank of each block, and ratios per block."""
    slowest = {way: [max(block) for block in zip(*(found[way] for found in by_rank), strict=True)] for way in WAYS}
    for way, seconds in slowest.items():
        rows[f"{way}_{size}"].samples += seconds
        if way != "all_reduce":
            pairs = zip(seconds, slowest["all_reduce"], strict=True)
            rows[f"{way}_ratio_{size}"].samples += [ours / theirs for ours, theirs in pairs]
