"""Kill a writer of checkpoints at random moments, and look each time at what is left.

    python -m tests.checkpoint.kill_writers FOLDER KILLS SEED

A process of its own, since it forks: torch is imported once, and a writer is there within a millisecond. Prints one
line of JSON. Lesson 10 kills writers that use torch.save alone, and shows what they leave.
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

from ddp_course.checkpoint.folder import Checkpointer, CheckpointError

NUMEL = 200_000  # 0.8 MB


def state_at(step: int) -> dict:
    return {"model": {"w": torch.full((NUMEL,), float(step)), "b": torch.full((10,), float(step))}, "step": step}


def write_for_ever(folder: Path, first: int, ready: int) -> None:
    """Save step after step; tell the parent just before the first byte."""
    checkpoints = Checkpointer(folder, keep=2)
    os.write(ready, b"!")
    for step in itertools.count(first):
        checkpoints.save(state_at(step), step)


def save_once(folder: Path, step: int) -> None:
    with Checkpointer(folder, keep=2) as checkpoints:
        checkpoints.save(state_at(step), step)


def newest(folder: Path) -> int:
    """Return the step of what can be loaded, after comparing every number in it.

    Raises:
        CheckpointError: nothing can be loaded, or something newer had to be passed over.
    """
    found = Checkpointer(folder, keep=2).load_latest()
    if found is None or found.passed_over:
        raise CheckpointError(f"nothing, or not the newest: {found and found.passed_over}")
    expected = state_at(found.step)
    assert found.state["step"] == found.step
    assert all(torch.equal(found.state["model"][name], tensor) for name, tensor in expected["model"].items())
    return found.step


def one_kill(folder: Path, first: int, after_s: float) -> None:
    hear, tell = os.pipe()
    writer = os.fork()
    if writer == 0:
        try:
            write_for_ever(folder, first, tell)
        finally:
            os._exit(1)  # reached only if a save failed
    os.read(hear, 1)
    time.sleep(after_s)
    os.kill(writer, signal.SIGKILL)
    _, status = os.waitpid(writer, 0)
    os.close(hear), os.close(tell)
    assert os.WTERMSIG(status) == signal.SIGKILL, "the writer had ended by itself"


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)  # no threads, so a fork copies all there is
    warnings.simplefilter("error")
    rng, report = random.Random(seed), {"seed": seed, "kills": kills, "bad": [], "unfinished": 0, "back": 0}
    start = time.perf_counter()
    for _ in range(3):
        save_once(folder, 0)
    longest_s, last = min(0.08, time.perf_counter() - start), 0
    for kill in range(kills):
        one_kill(folder, last + 1, rng.uniform(0, longest_s))
        report["unfinished"] += any(folder.glob(".*.unfinished"))
        try:
            step = newest(folder)
        except CheckpointError as error:
            report["bad"].append(f"kill {kill}: {error}")
            continue
        report["back"] += step < last
        last = step
    left = sorted(path.name for path in folder.iterdir())
    save_once(folder, last + 1)  # one save that nobody disturbs tidies up
    print(json.dumps(report | {"left": left, "last": last, "files": sorted(path.name for path in folder.iterdir())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
