"""How long until a sampler's first index, how much memory, and how many indices per second?

Rank 0 of 4, shuffled. Time and memory until the first index are those of a fresh process for each sample, whose
imports are done before: making the sampler, asking for an iterator, taking one index. Memory is how far the process
grew at its largest (VmHWM), which counts torch's tensors too. Indices per second are measured in one process, in
blocks that take turns, over a rank's whole epoch.

Left out on purpose: `DistributedSampler` at 10^9. Its list of Python numbers alone takes tens of gigabytes per rank.
Read next: `measure.py`, what is made of the samples.
"""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path

from torch.utils.data import DistributedSampler, Sampler

from benchmarks.measure import (
    Plan,
    Result,
    Row,
    Target,
    attempt,
    find,
    in_fresh_interpreter,
    refuse_unknown,
    show_progress,
)
from benchmarks.turns import beside, in_turns, quotients
from ddp_course.data.sampler import ShardSampler

TITLE = "A shuffled epoch for rank 0 of 4: ShardSampler beside torch's DistributedSampler"
NOTES = [
    "To the first index: in a fresh process each, without its imports. Memory: how far the process grew, in MB.",
    "Indices: a rank's whole epoch of 10^7 samples. The ratio is that of two ways within one block.",
]
LENGTHS = {"1e7": 10**7, "1e9": 10**9}
WORLD_SIZE = 4
WAYS = {
    "torch": "DistributedSampler",
    "compatible": "ShardSampler, compatible",
    "streaming": "ShardSampler, streaming",
}
TOO_LARGE = {  # the two that hold a list of all indices
    key: "not tried: 8 bytes per entry and 32 per number, tens of GB on each rank" for key in ("torch", "compatible")
}
STARTS, QUICK_STARTS = 7, 2
BLOCKS, QUICK_BLOCKS = 5, 2
LIMIT_S = 600.0  # for all fresh processes of one way, or all whole epochs
FIRST_S, FIRST_MB = 0.010, 10.0  # targets at 10^9, streaming


def build(way: str, length: int) -> Sampler[int]:
    if way == "torch":
        return DistributedSampler(range(length), WORLD_SIZE, 0)
    return ShardSampler(length, WORLD_SIZE, 0, mode=way)


# --- Until the first index ---------------------------------------------------------------------------


def first_index(way: str, length: int) -> dict[str, float]:
    """Return the seconds until the first index, and the megabytes that this process, a fresh one, grew by."""
    before = largest_mb()
    start = time.perf_counter()
    index = next(iter(build(way, length)))
    seconds = time.perf_counter() - start
    if not 0 <= index < length:
        raise RuntimeError(f"{way} gave {index} for a dataset of {length}")
    return {"s": seconds, "MB": largest_mb() - before}


def largest_mb() -> float:
    """Return the largest size this process has had, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM"))


def in_fresh_process(way: str, length: int) -> dict[str, float]:
    code = f"import json; from benchmarks import sampler; print(json.dumps(sampler.first_index({way!r}, {length})))"
    return json.loads(in_fresh_interpreter(code))


# --- A whole epoch -----------------------------------------------------------------------------------


def timed_blocks(length: int, blocks: int) -> dict[str, list[float]]:
    """Return the indices per second of every way, for each block."""

    def rate(way: str) -> float:
        sampler = build(way, length)
        start = time.perf_counter()
        deque(sampler, maxlen=0)  # takes every index and keeps none
        return len(sampler) / (time.perf_counter() - start)

    return in_turns(WAYS, blocks, rate)


# --- The table ---------------------------------------------------------------------------------------


def measure(plan: Plan) -> Result:
    """Measure all that `plan` wants; the number of ranks plays no part."""
    rows = {row.key: row for row in empty_rows()}
    refuse_unknown("sampler", plan, rows.values())
    for name, length in LENGTHS.items():
        for way in WAYS:
            mine = {unit: rows[f"{way}_first_{unit}_{name}"] for unit in ("s", "MB")}
            if any(plan.wants(row.key) and not row.missing for row in mine.values()):
                show_progress(f"sampler: {way}, {name}")
                with attempt(mine.values(), "a fresh process", LIMIT_S):
                    for _ in range(QUICK_STARTS if plan.quick else STARTS):
                        for unit, found in in_fresh_process(way, length).items():
                            mine[unit].samples.append(found)
    rates = {key: row for key, row in rows.items() if "_rate" in key}
    if any(map(plan.wants, rates)):
        show_progress("sampler: whole epochs")
        with attempt(rates.values(), "whole epochs", LIMIT_S):
            fill_rates(rates, timed_blocks(10**7, QUICK_BLOCKS if plan.quick else BLOCKS))
    wanted = [row for row in rows.values() if plan.wants(row.key)]
    return Result(TITLE, wanted, targets(wanted), NOTES)


def empty_rows() -> list[Row]:
    rows = []
    for name in LENGTHS:
        for way, label in WAYS.items():
            missing = TOO_LARGE.get(way, "") if name == "1e9" else ""
            rows.append(Row(f"{way}_first_s_{name}", f"{label}, first of {name}", 1, missing=missing))
            rows.append(Row(f"{way}_first_MB_{name}", f"{label}, MB for {name}", 1, unit="", missing=missing))
    rows += [Row(f"{way}_rate", f"{label}, indices per s", 1, unit="") for way, label in WAYS.items()]
    rows += [
        Row(f"{way}_rate_ratio", f"{WAYS[way]} / {WAYS['torch']}, indices per s", 1, unit="")
        for way in beside("torch", WAYS)
    ]
    return rows


def fill_rates(rows: dict[str, Row], rates: dict[str, list[float]]) -> None:
    """Add each way's indices per second, and how they compare with torch's in the same block."""
    for way in WAYS:
        rows[f"{way}_rate"].samples += rates[way]
    for way, (above, below) in beside("torch", WAYS).items():
        rows[f"{way}_rate_ratio"].samples += quotients(rates[above], rates[below])


def targets(rows: list[Row]) -> list[Target]:
    medians = {
        key: row.median if (row := find(rows, key, 1)) else None
        for key in ("streaming_first_s_1e9", "streaming_first_MB_1e9", "streaming_rate_ratio")
    }
    ratio = medians["streaming_rate_ratio"]
    slower = None if ratio is None else 1 / ratio
    return [
        Target("streaming: to the first index of 10^9", FIRST_S, medians["streaming_first_s_1e9"], "s"),
        Target("streaming: memory for 10^9, MB", FIRST_MB, medians["streaming_first_MB_1e9"]),
        Target("streaming: time for an index, DistributedSampler's = 1", 1.0, slower),
    ]
