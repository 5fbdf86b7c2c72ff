"""What every way of running a function on ranks is given to run.

Ranks import this file, so it imports torch alone: no way pays for the imports of another.
"""

from __future__ import annotations

import os
from datetime import timedelta
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist

TIMEOUT_S = 60.0


def threads_per_rank(world_size: int) -> int:
    """The share of the cores that `launch` gives each rank."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // world_size)


def one_all_reduce(rank: int, world_size: int) -> float:
    """Sum one number over the ranks.

    Collective: one all_reduce of 4 bytes, on the default group.
    """
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    return x.item()


def join(rank: int, world_size: int, path: str, threads: int) -> None:
    """Open a gloo group by a file store, as a rank with `threads` threads.

    Collective: every rank joins once.
    """
    torch.set_num_threads(threads)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size, timeout=timeout)


def whole_life(rank: int, world_size: int, path: str, threads: int, answers: SimpleQueue) -> None:
    """All that a rank of plain `mp.spawn` does: join, one all_reduce, answer, leave.

    Collective: one all_reduce and one barrier.
    """
    join(rank, world_size, path, threads)
    answers.put((rank, one_all_reduce(rank, world_size)))
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()
