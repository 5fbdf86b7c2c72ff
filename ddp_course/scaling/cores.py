"""Which core does each rank compute on?

A rank that may wander, or that opens a thread for each core, is helped by cores that another rank will take from it.
Then one rank looks fast, and two look bad. So each rank gets one thread and one core, from the first measurement on.
Cores that are two halves of one physical core come last, for they share its arithmetic.

Left out on purpose: memory controllers (NUMA), and limits of a container that take time rather than cores.
Read next: `measure.py`, which pins its ranks.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from ddp_course.groups import usable_cores

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def core_order(siblings: dict[int, str]) -> list[int]:
    """Return the cores, one of each physical core first, then the others.

    Args:
        siblings: for each core, a text that is the same for all halves of one physical core.
    """
    seen: dict[str, int] = {}
    halves = []
    for core in sorted(siblings):
        halves.append((seen.get(siblings[core], 0), core))
        seen[siblings[core]] = seen.get(siblings[core], 0) + 1
    return [core for _, core in sorted(halves)]


def own_cores(world_size: int) -> list[int] | None:
    """Return a core for each rank, or None where there are too few or the system does not let a program choose."""
    if not hasattr(os, "sched_setaffinity") or usable_cores() < world_size:
        return None
    return core_order(_siblings())[:world_size]


def _siblings() -> dict[int, str]:
    found = {}
    for core in os.sched_getaffinity(0):
        found[core] = str(core)
        with contextlib.suppress(OSError):  # where the system does not tell, each counts as a whole one
            found[core] = Path(_TOPOLOGY.format(core)).read_text().strip()
    return found


def cores_note(world_size: int) -> str:
    """Return a sentence about the cores that `world_size` ranks get."""
    cores, there = own_cores(world_size), usable_cores()
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    threads = "with one thread" + " each" * (world_size > 1)
    if there < world_size:
        most = f"at most {there / world_size:.0%} of the rate of {world_size} cores can be reached"
        return f"{ranks} share {there} core{'s' * (there > 1)}, {threads}: {most}"
    if cores is None:
        return f"{ranks} {threads}; not pinned to cores, for this system does not let a program choose"
    pinned = f"pinned to core{'s' * (world_size > 1)} {', '.join(map(str, cores))}, {threads}"
    halves = len({text for core, text in _siblings().items() if core in cores}) < world_size
    return f"{ranks} {pinned}" + ("; some are halves of one physical core" if halves else "")


def pin(core: int | None) -> None:
    """Let this process compute with one thread, on `core` alone; None chooses no core.

    All threads are pinned, gloo's too: what a rank's messages cost in computing, its own core pays.
    """
    torch.set_num_threads(1)
    if core is None:
        return
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ["0"]:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), {core})
