"""How long do a sealed, atomic save and a checked load take beside torch.save and torch.load?

One process, one file of float32 tensors in the system's temporary folder. Saving is measured three ways: `torch.save`
alone, which leaves the bytes in memory for the system to write some day; `torch.save` and fsync, what a checkpoint
needs at least; and `save_checkpoint`, which also hashes, renames, and brings the folder to the disk.

Left out on purpose: a disk that is not in use by anybody else, and files that are no longer in memory when they are
read. Both cost all ways the same.
Read next: `turns.py`, how the ways take turns.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.measure import Plan, Result
from benchmarks.turns import Comparison, Seconds, in_turns
from ddp_course.checkpoint.file import load_checkpoint, save_checkpoint

TITLE = "One checkpoint: sealed and atomic, beside torch.save and torch.load"
NOTES = ["Seconds per file. A ratio is that of two ways within one block. Loads read files that are in memory."]
SIZES = {"1MB": 1, "64MB": 16, "512MB": 128}  # tensors of 4 MB, but for the smallest
BLOCKS, QUICK_BLOCKS = 9, 3


def torch_save_fsync(path: Path, state: dict) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


WAYS: dict[str, Callable[[Path, dict], object]] = {
    "torch_save": lambda path, state: torch.save(state, path),
    "torch_save_fsync": torch_save_fsync,
    "save": save_checkpoint,
    "torch_load": lambda path, state: torch.load(path, map_location="cpu", weights_only=True),
    "load": lambda path, state: load_checkpoint(path, "cpu"),
}
LABELS = {
    "torch_save": "torch.save",
    "torch_save_fsync": "torch.save, fsync",
    "save": "save_checkpoint",
    "torch_load": "torch.load",
    "load": "load_checkpoint",
}
RATIOS = {
    "save_over_fsync": ("save", "torch_save_fsync"),
    "save": ("save", "torch_save"),
    "load": ("load", "torch_load"),
}
COMPARISON = Comparison("checkpoint", LABELS, RATIOS, SIZES, limit_s=240)


def state_of(size: str) -> dict:
    """Return tensors of `size` bytes in all, no two alike."""
    numel = 250_000 if SIZES[size] == 1 else 1_000_000
    generator = torch.Generator().manual_seed(0)
    return {"model": {f"w{i}": torch.randn(numel, generator=generator) for i in range(SIZES[size])}, "step": 1}


def timed_blocks(folder: Path, state: dict, blocks: int) -> Seconds:
    """Return the seconds of each way, after each was tried once and what it read was checked."""

    def seconds_of(way: str) -> float:
        start = time.perf_counter()
        WAYS[way](folder / f"{way}.pt", state)
        return time.perf_counter() - start

    for way in WAYS:  # a load needs a file; a save replaces one, as in the middle of a run
        save_checkpoint(folder / f"{way}.pt", state)
        check(WAYS[way](folder / f"{way}.pt", state), state, way)
    return in_turns(WAYS, blocks, seconds_of)


def check(found: object, state: dict, way: str) -> None:
    """Hold what a way read against what was written."""
    if isinstance(found, dict):
        wrong = [name for name, tensor in state["model"].items() if not torch.equal(tensor, found["model"][name])]
        if wrong:
            raise RuntimeError(f"{way} read other numbers than were written: {wrong[:3]}")


def measure(plan: Plan) -> Result:
    """Time the ways for every size that `plan` wants; the number of ranks plays no part."""

    def timed(_: int, size: str) -> list[Seconds]:
        with tempfile.TemporaryDirectory() as folder:
            return [timed_blocks(Path(folder), state_of(size), QUICK_BLOCKS if plan.quick else BLOCKS)]

    return Result(TITLE, COMPARISON.measure(plan, [1], timed), notes=NOTES)
