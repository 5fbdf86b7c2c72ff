"""How long do a sealed, atomic save and a checked load take beside torch.save and torch.load?

One process, one file of float32 tensors in the system's temporary folder. The ways take turns in an order drawn
anew for each block, and a ratio is formed within one block. Saving is measured three ways: `torch.save` alone, which
leaves the bytes in memory for the system to write some day; `torch.save` and fsync, what a checkpoint needs at
least; and `save_checkpoint`, which also hashes, renames, and brings the folder to the disk.

Left out on purpose: a disk that is not in use by anybody else, and files that are no longer in memory when they are
read. Both cost all ways the same.
Read next: `measure.py`, what is made of the samples.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.measure import Plan, Result, Row, limit
from ddp_course.checkpoint.file import load_checkpoint, save_checkpoint

TITLE = "One checkpoint: sealed and atomic, beside torch.save and torch.load"
NOTES = ["Seconds per file. A ratio is that of two ways within one block. Loads read files that are in memory."]
SIZES = {"1MB": 1, "64MB": 16, "512MB": 128}  # tensors of 4 MB, but for the smallest
BLOCKS, QUICK_BLOCKS = 9, 3
LIMIT_S = 240.0  # for all blocks of one size


def torch_save(path: Path, state: dict) -> None:
    torch.save(state, path)


def torch_save_fsync(path: Path, state: dict) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def torch_load(path: Path, state: dict) -> dict:
    return torch.load(path, map_location="cpu", weights_only=True)


def checked_load(path: Path, state: dict) -> dict:
    return load_checkpoint(path, "cpu")


WAYS: dict[str, tuple[str, Callable]] = {
    "torch_save": ("torch.save", torch_save),
    "torch_save_fsync": ("torch.save, fsync", torch_save_fsync),
    "save": ("save_checkpoint", save_checkpoint),
    "torch_load": ("torch.load", torch_load),
    "load": ("load_checkpoint", checked_load),
}
# Which way is divided by which.
RATIOS = {
    "save_over_fsync": ("save", "torch_save_fsync"),
    "save": ("save", "torch_save"),
    "load": ("load", "torch_load"),
}


def state_of(size: str) -> dict:
    """Return tensors of `size` bytes in all, no two alike."""
    numel = 250_000 if SIZES[size] == 1 else 1_000_000
    generator = torch.Generator().manual_seed(0)
    return {"model": {f"w{i}": torch.randn(numel, generator=generator) for i in range(SIZES[size])}, "step": 1}


def timed_blocks(folder: Path, state: dict, blocks: int) -> dict[str, list[float]]:
    """Return seconds by way, for each block, after each way was tried once and what it read was checked."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    rng = random.Random(0)
    for way in WAYS:  # a load needs a file; a save replaces one, as in the middle of a run
        save_checkpoint(folder / f"{way}.pt", state)
        check(WAYS[way][1](folder / f"{way}.pt", state), state, way)
    for _ in range(blocks):
        for way in rng.sample(list(WAYS), len(WAYS)):
            path = folder / f"{way}.pt"
            start = time.perf_counter()
            WAYS[way][1](path, state)
            seconds[way].append(time.perf_counter() - start)
    return seconds


def check(found: object, state: dict, way: str) -> None:
    """Hold what a way read against what was written."""
    if isinstance(found, dict):
        wrong = [name for name, tensor in state["model"].items() if not torch.equal(tensor, found["model"][name])]
        if wrong:
            raise RuntimeError(f"{way} read other numbers than were written: {wrong[:3]}")


def measure(plan: Plan) -> Result:
    """Time the ways for every size that `plan` wants; the number of ranks plays no part."""
    rows = empty_rows()
    if unknown := plan.only - {row.key for row in rows}:
        sys.exit(f"checkpoint has no row {', '.join(sorted(unknown))}; choose from "
                 f"{', '.join(sorted(row.key for row in rows))}")  # fmt: skip
    for size in SIZES:
        mine = {row.key: row for row in rows if row.key.endswith(f"_{size}")}
        if not any(plan.wants(key) for key in mine):
            continue
        print(f"checkpoint: {size}", file=sys.stderr, flush=True)
        try:
            with tempfile.TemporaryDirectory() as folder, limit(LIMIT_S, size):
                fill(mine, size, timed_blocks(Path(folder), state_of(size), QUICK_BLOCKS if plan.quick else BLOCKS))
        except (OSError, RuntimeError) as error:  # a TimeoutError is an OSError
            for row in mine.values():
                row.failed = f"{type(error).__name__}: {error}"
    return Result(TITLE, [row for row in rows if plan.wants(row.key)], notes=NOTES)


def empty_rows() -> list[Row]:
    rows = []
    for size in SIZES:
        rows += [Row(f"{key}_{size}", f"{label}, {size}", 1) for key, (label, _) in WAYS.items()]
        rows += [
            Row(f"{key}_ratio_{size}", f"{WAYS[above][0]} / {WAYS[below][0]}, {size}", 1, unit="")
            for key, (above, below) in RATIOS.items()
        ]
    return rows


def fill(rows: dict[str, Row], size: str, seconds: dict[str, list[float]]) -> None:
    """Turn seconds into the samples of one size, and ratios per block."""
    for way, samples in seconds.items():
        rows[f"{way}_{size}"].samples += samples
    for key, (above, below) in RATIOS.items():
        rows[f"{key}_ratio_{size}"].samples += [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]
