"""Kill a writer of checkpoints at random moments, and look each time at what is left.

    python -m tests.checkpoint.kill_writers FOLDER KILLS SEED WAY

A process of its own, since it forks: torch is imported once, and a writer is there within a millisecond. WAY is
"checkpointer", or "plain" for a torch.save straight to the final name. Prints one line of JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import torch

from ddp_course.checkpoint.folder import Checkpointer, CheckpointError, load_checkpoint

NUMEL = 200_000  # 0.8 MB


def state_at(step: int) -> dict:
    return {"model": {"w": torch.full((NUMEL,), float(step)), "b": torch.full((10,), float(step))}, "step": step}


def write_for_ever(folder: Path, way: str, first: int, ready: int) -> None:
    """Save step after step; tell the parent just before the first byte."""
    checkpoints = Checkpointer(folder, keep=2)
    os.write(ready, b"!")
    for step in itertools.count(first):
        if way == "plain":
            torch.save(state_at(step), folder / "last.pt")
        else:
            checkpoints.save(state_at(step), step)


def save_once(folder: Path, way: str, step: int) -> None:
    if way == "plain":
        torch.save(state_at(step), folder / "last.pt")
        return
    with Checkpointer(folder, keep=2) as checkpoints:
        checkpoints.save(state_at(step), step)


def newest(folder: Path, way: str) -> int:
    """Return the step of what can be loaded, after comparing every number in it.

    Raises:
        CheckpointError: nothing can be loaded, or something newer had to be passed over.
    """
    if way == "plain":
        try:
            state = torch.load(folder / "last.pt", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{type(error).__name__}: {error}") from error
    else:
        found = Checkpointer(folder, keep=2).load_latest()
        if found is None or found.passed_over:
            raise CheckpointError(f"nothing, or not the newest: {found and found.passed_over}")
        state = load_checkpoint(found.path, "cpu")
        assert found.step == state["step"]
    expected = state_at(state["step"])["model"]
    assert all(torch.equal(state["model"][name], expected[name]) for name in expected)
    return state["step"]


def one_kill(folder: Path, way: str, first: int, after_s: float) -> None:
    hear, tell = os.pipe()
    writer = os.fork()
    if writer == 0:
        try:
            write_for_ever(folder, way, first, tell)
        finally:
            os._exit(1)  # reached only if a save failed
    os.read(hear, 1)
    time.sleep(after_s)
    os.kill(writer, signal.SIGKILL)
    _, status = os.waitpid(writer, 0)
    os.close(hear), os.close(tell)
    assert os.WTERMSIG(status) == signal.SIGKILL, "the writer had ended by itself"


def main(folder: Path, kills: int, seed: int, way: str) -> None:
    torch.set_num_threads(1)  # no threads, so a fork copies all there is
    warnings.simplefilter("error")
    rng, report = random.Random(seed), {"seed": seed, "kills": kills, "bad": [], "unfinished": 0, "back": 0}
    start = time.perf_counter()
    for _ in range(3):
        save_once(folder, way, 0)
    longest_s, last = min(0.08, time.perf_counter() - start), 0
    for kill in range(kills):
        one_kill(folder, way, last + 1, rng.uniform(0, longest_s))
        report["unfinished"] += any(folder.glob(".*.unfinished"))
        try:
            step = newest(folder, way)
        except CheckpointError as error:
            report["bad"].append(f"kill {kill}: {error}")
            continue
        report["back"] += step < last
        last = step
    left = sorted(path.name for path in folder.iterdir())
    save_once(folder, way, last + 1)  # one save that nobody disturbs tidies up
    print(json.dumps(report | {"left": left, "last": last, "files": sorted(path.name for path in folder.iterdir())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
