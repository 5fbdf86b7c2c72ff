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
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from torch.utils.data import DistributedSampler, Sampler

from benchmarks.measure import Plan, Result, Row, Target, find, limit
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
LIMIT_S = 120.0  # for one fresh process, or one block
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
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"the fresh process ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


# --- A whole epoch -----------------------------------------------------------------------------------


def timed_blocks(length: int, blocks: int) -> Iterator[dict[str, float]]:
    """Yield, for each block, the indices per second of every way."""
    rng = random.Random(0)
    for _ in range(blocks):
        found = {}
        for way in rng.sample(list(WAYS), len(WAYS)):
            sampler = build(way, length)
            with limit(LIMIT_S, f"an epoch of {way}"):
                start = time.perf_counter()
                deque(sampler, maxlen=0)  # takes every index and keeps none
                found[way] = len(sampler) / (time.perf_counter() - start)
        yield found


# --- The table ---------------------------------------------------------------------------------------


def measure(plan: Plan) -> Result:
    """Measure all that `plan` wants; the number of ranks plays no part."""
    rows = {row.key: row for row in empty_rows()}
    if unknown := plan.only - set(rows):
        sys.exit(f"sampler has no row {', '.join(sorted(unknown))}; choose from {', '.join(sorted(rows))}")
    for name in LENGTHS:
        for way in WAYS:
            mine = {unit: rows[f"{way}_first_{unit}_{name}"] for unit in ("s", "MB")}
            if any(plan.wants(row.key) and not row.missing for row in mine.values()):
                print(f"sampler: {way}, {name}", file=sys.stderr, flush=True)
                fill_first(mine, way, LENGTHS[name], QUICK_STARTS if plan.quick else STARTS)
    rates = {key: row for key, row in rows.items() if "_rate" in key}
    if any(map(plan.wants, rates)):
        print("sampler: whole epochs", file=sys.stderr, flush=True)
        try:
            for block in timed_blocks(10**7, QUICK_BLOCKS if plan.quick else BLOCKS):
                fill_rates(rates, block)
        except (RuntimeError, TimeoutError) as error:
            for row in rates.values():
                row.failed = f"{type(error).__name__}: {error}"
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
        Row(f"{way}_rate_ratio", f"{label} / {WAYS['torch']}, indices per s", 1, unit="")
        for way, label in WAYS.items()
        if way != "torch"
    ]
    return rows


def fill_first(rows: dict[str, Row], way: str, length: int, starts: int) -> None:
    try:
        for _ in range(starts):
            found = in_fresh_process(way, length)
            for unit, row in rows.items():
                row.samples.append(found[unit])
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        for row in rows.values():
            row.failed = f"{type(error).__name__}: {error}"


def fill_rates(rows: dict[str, Row], block: dict[str, float]) -> None:
    """Add one block: each way's indices per second, and how they compare with torch's in this block."""
    for way, rate in block.items():
        rows[f"{way}_rate"].samples.append(rate)
        if way != "torch":
            rows[f"{way}_rate_ratio"].samples.append(rate / block["torch"])


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
