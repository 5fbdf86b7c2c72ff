"""How fast do these ranks add up a tensor?

First a sum that everybody can check. Then all_reduce over growing sizes: a small one shows the latency, the large
ones the bandwidth. Algorithm bandwidth is bytes divided by time. Bus bandwidth multiplies it by 2 (W - 1) / W, the
share of the bytes that each rank has to send in a ring, so it can be compared with the network's speed whatever W is.

Source: nccl-tests, doc/PERFORMANCE.md, for the two definitions.
Left out on purpose: GPUs and NCCL, which nccl-tests measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

SMALL_BYTES = 4
SECONDS_A_SIZE = 0.3  # how long to repeat one size, roughly
MOST_REPEATS = 50


@dataclass(frozen=True)
class Measured:
    """What one size took."""

    bytes: int
    repeats: int
    seconds: float  # of one all_reduce, mean over repeats and ranks
    algorithm_GB_s: float  # 10^9 bytes
    bus_GB_s: float


def rate(size_bytes: int, repeats: int, seconds: float, world_size: int) -> Measured:
    """Return the two bandwidths for an all_reduce of `size_bytes` that took `seconds`."""
    algorithm = size_bytes / seconds / 1e9
    return Measured(size_bytes, repeats, seconds, algorithm, algorithm * 2 * (world_size - 1) / world_size)


def sizes_up_to(largest_bytes: int) -> list[int]:
    """Return 4 bytes, then 64 KiB and sixteen times more each time, up to and with the largest."""
    sizes, size = [SMALL_BYTES], 64 * 2**10
    while size < largest_bytes:
        sizes.append(size)
        size *= 16
    return [*sizes, max(largest_bytes // 4 * 4, SMALL_BYTES)]


def sum_is_right() -> bool:
    """Add up numbers that differ from rank to rank and by position, and compare with the sum worked out by hand.

    Returns:
        Whether it was right on every rank.
    Collective: two all_reduces, every rank.
    """
    world_size, position = dist.get_world_size(), torch.arange(1000, dtype=torch.float64)
    total = position * (dist.get_rank() + 1)
    dist.all_reduce(total)
    right = torch.equal(total, position * (world_size * (world_size + 1) // 2))
    return bool(_reduced(right, dist.ReduceOp.MIN))


def measure(largest_bytes: int, remaining_s: Callable[[], float]) -> list[Measured]:
    """Measure all_reduce at growing sizes, as long as there is time.

    Args:
        remaining_s: seconds that this rank has left. The rank with the least decides.
    Collective: many all_reduces, every rank; how many is agreed on.
    """
    found: list[Measured] = []
    for size_bytes in sizes_up_to(largest_bytes):
        tensor = torch.zeros(size_bytes // 4)
        once_s = _mean(_repeat(tensor, 1))  # also warms up
        repeats = max(1, min(MOST_REPEATS, int(SECONDS_A_SIZE / once_s)))
        seconds = _mean(_repeat(tensor, repeats))
        found.append(rate(size_bytes, repeats, seconds, dist.get_world_size()))
        # The next size is up to sixteen times as large, and runs at least twice.
        if _reduced(remaining_s(), dist.ReduceOp.MIN) < 2 * 16 * seconds + SECONDS_A_SIZE:
            break
    return found


def _repeat(tensor: torch.Tensor, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    return (time.perf_counter() - started) / repeats


def _mean(seconds: float) -> float:
    """Return the mean over the ranks: the same number on all of them, so all decide alike."""
    return _reduced(seconds, dist.ReduceOp.SUM) / dist.get_world_size()


def _reduced(number: float, op: dist.ReduceOp) -> float:
    """Collective: one all_reduce, every rank."""
    tensor = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(tensor, op=op)
    return tensor.item()
