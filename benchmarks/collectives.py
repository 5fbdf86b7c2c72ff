"""How long do the course's ring and tree take beside torch's own all_reduce?

All three sum the same float32 tensor over gloo on loopback, on ranks that stay alive, in blocks of calls.

Left out on purpose: a real network, where latency and bandwidth are others, and so is the crossover.
Read next: `turns.py`, how the ways take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.measure import Plan, Result
from benchmarks.turns import Comparison, Seconds, beside, in_turns, run_on_ranks
from ddp_course.collectives import ring_all_reduce, tree_all_reduce

TITLE = "One all-reduce of float32 tensors: the course's ring and tree beside torch's"
NOTES = [
    "Seconds of the slowest rank, per call. A ratio is that of two ways within one block of calls.",
    "With more ranks than cores, ranks take turns, and whoever needs most steps waits most: the ring, at small sizes.",
]
SIZES = {"4kB": 4_000, "1MB": 1_000_000, "16MB": 16_000_000}  # bytes
CALLS = {"4kB": 50, "1MB": 8, "16MB": 2}  # in a block
BLOCKS, QUICK_BLOCKS = 11, 3
WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
}
LABELS = {"all_reduce": "dist.all_reduce", "ring": "ring_all_reduce", "tree": "tree_all_reduce"}
COMPARISON = Comparison("collectives", LABELS, beside("all_reduce", WAYS), SIZES, limit_s=240)


def timed_blocks(rank: int, world_size: int, size: str, blocks: int) -> Seconds:
    """Return this rank's seconds per call.

    Collective: one barrier and some all-reduces per block and way, and one checked all-reduce per way before.
    """
    numel, calls = SIZES[size] // 4, CALLS[size]
    for name, way in WAYS.items():
        tensor = torch.full((numel,), rank + 1.0)
        way(tensor)
        expected = world_size * (world_size + 1) / 2
        if not bool((tensor == expected).all()):
            raise RuntimeError(f"rank {rank}: {name} gave {tensor.unique().tolist()[:3]}, expected {expected}")
    tensor = torch.zeros(numel)

    def seconds_of(name: str) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            WAYS[name](tensor)
        return (time.perf_counter() - start) / calls

    return in_turns(WAYS, blocks, seconds_of)


def measure(plan: Plan) -> Result:
    """Time the three ways for every size and number of ranks that `plan` wants."""
    blocks = QUICK_BLOCKS if plan.quick else BLOCKS
    rows = COMPARISON.measure(
        plan, plan.world_sizes, lambda world_size, size: run_on_ranks(timed_blocks, world_size, size, blocks)
    )
    return Result(TITLE, rows, notes=NOTES)
