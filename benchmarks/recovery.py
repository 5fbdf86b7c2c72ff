"""What do checkpoints cost in each step, and how long does a run stand still when a rank is killed?

The first part trains a network of 16 MB, with as much of momentum, on two ranks. A block is `STEPS` steps with one
checkpoint after the first, and ends when its file is on the disk. How long the call itself holds up the training is a
row of its own. torch.distributed.checkpoint divides the tensors among the ranks and brings its files to the disk, too.

The second part asks what it costs to agree, in each step of a small network, on whether to save. The third kills a rank
and notes when each part of the new start was done: by torchrun, whose agent starts the ranks again, by `launch` with
the fork server, called again.

Left out on purpose: a GPU, from which the copy has to come first, and a disk that is slow and shared.
Read next: `turns.py`, how the ways take turns; `restarted.py`, the training that is killed.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import restarted
from benchmarks.measure import LIMIT_S, Plan, Result, Row, attempt, refuse_unknown, show_progress
from benchmarks.turns import Seconds, in_turns, quotients, run_on_ranks, slowest
from ddp_course import RankError, launch
from ddp_course.checkpoint.cadence import Cadence
from ddp_course.checkpoint.folder import Checkpointer
from ddp_course.diagnose.nodes import Node
from ddp_course.models import MLP

TITLE = "Checkpoints while training, and the way back after a kill"
STEPS = 10  # in a block, with one checkpoint
WIDE, SMALL = (1024, 1536, 32), (64, 64, 32)  # features, hidden width, rows in a batch
BLOCKS, QUICK_BLOCKS = 9, 3
SMALL_STEPS = 60
KILLS, QUICK_KILLS = 3, 1
FRESH = {"backend": "gloo", "start_method": "forkserver", "limit_s": 60, "quiet": True}
NOTES = [
    f"Seconds per step: of the slowest rank, over {STEPS} steps with one checkpoint of 32 MB, until it is on the disk.",
    "A hold-up is how long the call to save takes. A ratio is that of two ways within one block.",
    "After a kill: each row is a part, from the end of the one above it; the last is the whole.",
]
WAYS = {
    "none": "no checkpoint",
    "waiting": "Checkpointer.save",
    "background": "Checkpointer.save_later",
    "dcp": "torch's dcp.save",
    "dcp_async": "torch's dcp.async_save",
}
SAVING = [way for way in WAYS if way != "none"]
AGREE = {"alone": "a small step", "agreed": "a small step with Cadence.next"}
# What is done at each moment, in order; "killed" is the beginning.
PARTS = {
    "torchrun": {"started": "torchrun: noticed, ranks started", "torch": "torch imported", "met": "group open",
                 "imported": "training imported", "ready": "images and checkpoint read", "step": "first step"},
    "launch": {"noticed": "launch: noticed", "met": "ranks started, group open", "imported": "training imported",
               "ready": "images and checkpoint read", "step": "first step"},
}  # fmt: skip


# --- In the ranks ----------------------------------------------------------------------------------


class Training:
    """One rank's training of an MLP, on rows that do not matter."""

    def __init__(self, features: int, hidden: int, rows: int) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(MLP(features, hidden, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.x, self.labels = torch.randn(rows, features), torch.zeros(rows, dtype=torch.long)

    def step(self) -> None:
        """Collective: DDP's all_reduces."""
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.x), self.labels).backward()
        self.optimizer.step()

    def state(self) -> dict:
        return {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}


class Ways:
    """The ways to save. Each is called with a state and a number, and returns what waits for the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, dist.get_rank()
        self.checkpoints = Checkpointer(folder / "ours", keep=1)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))  # torch's saving must not use DDP's

    def none(self, state: dict, number: int) -> Callable[[], object]:
        return lambda: None

    def waiting(self, state: dict, number: int) -> Callable[[], object]:
        self.checkpoints.save(state, number)
        return lambda: None

    def background(self, state: dict, number: int) -> Callable[[], object]:
        self.checkpoints.save_later(state, number)
        return self.checkpoints.finish

    def dcp(self, state: dict, number: int) -> Callable[[], object]:
        dcp.save(state, checkpoint_id=self.folder / f"dcp{number}", process_group=self.group)
        return lambda: None

    def dcp_async(self, state: dict, number: int) -> Callable[[], object]:
        return dcp.async_save(state, checkpoint_id=self.folder / f"dcp{number}", process_group=self.group).result

    def tidy(self, number: int) -> None:
        if self.rank == 0:
            shutil.rmtree(self.folder / f"dcp{number}", ignore_errors=True)


def timed_saving(rank: int, world_size: int, folder: Path, blocks: int) -> dict[str, list[tuple[float, float]]]:
    """Return this rank's seconds, by way, for each block: per step, and for the call to save.

    Collective: one new_group; in each block a barrier, DDP's, and what each way does.
    """
    training, ways = Training(*WIDE), Ways(folder)
    numbers = itertools.count(1)
    seconds = in_turns(WAYS, blocks + 1, lambda way: one_block(training, ways, way, next(numbers)))
    ways.checkpoints.close()
    return {way: found[1:] for way, found in seconds.items()}  # the first one warms up


def one_block(training: Training, ways: Ways, way: str, number: int) -> tuple[float, float]:
    dist.barrier()
    start = time.perf_counter()
    training.step()
    before = time.perf_counter()
    wait = getattr(ways, way)(training.state(), number)
    held_up = time.perf_counter() - before
    for _ in range(STEPS - 1):
        training.step()
    wait()
    seconds = time.perf_counter() - start
    ways.tidy(number)
    return seconds / STEPS, held_up


def timed_agreement(rank: int, world_size: int, blocks: int) -> Seconds:
    """Return this rank's seconds per small step, with and without agreeing on whether to save.

    Collective: a barrier per block, DDP's, and those of `Cadence`.
    """
    training = Training(*SMALL)

    def small_steps(way: str) -> float:
        dist.barrier()
        start = time.perf_counter()
        for step in range(SMALL_STEPS):
            training.step()
            if way == "agreed":
                cadence.next(step)
        return (time.perf_counter() - start) / SMALL_STEPS

    with Cadence(seconds=1e9) as cadence:
        seconds = in_turns(AGREE, blocks + 1, small_steps)
        cadence.finish()
    return {way: found[1:] for way, found in seconds.items()}


# --- After a kill ----------------------------------------------------------------------------------


def killed_under_torchrun(folder: Path, world_size: int) -> dict[str, float]:
    with Node(["-m", "benchmarks.restarted", str(folder)], nproc=world_size, max_restarts=1) as node:
        if status := node.wait(LIMIT_S):
            raise RuntimeError(f"the node ended with status {status}\n{node.errors[-2000:]}")
        wrong = f"rank 0 went on at {restarted.DIES_IN - 1}" not in node.output
    return checked(restarted.moments(folder), wrong)


def killed_under_launch(folder: Path, world_size: int) -> dict[str, float]:
    try:
        launch(restarted.launched, world_size, (folder, True), **FRESH)
    except RankError as error:
        if error.code != "died":
            raise
        restarted.stamp(folder, "noticed")
    went_on_at = launch(restarted.launched, world_size, (folder, False), **FRESH)
    return checked(restarted.moments(folder), set(went_on_at) != {restarted.DIES_IN - 1})


def checked(moments: dict[str, float], wrong: bool) -> dict[str, float]:
    if wrong:
        raise RuntimeError("the new life did not go on from the last checkpoint")
    return moments


# --- The table -------------------------------------------------------------------------------------


def measure(plan: Plan) -> Result:
    """Measure on two ranks, or on the first number that `plan` names: what this asks hardly depends on it."""
    world_size, blocks = plan.world_sizes[0], QUICK_BLOCKS if plan.quick else BLOCKS
    rows = {row.key: row for row in empty_rows(world_size)}
    refuse_unknown("recovery", plan, rows.values())

    def kills(who: str, killed: Callable[[Path, int], dict[str, float]], folder: Path) -> None:
        for i in range(QUICK_KILLS if plan.quick else KILLS):
            (folder / str(i)).mkdir()
            fill_kill(rows, who, killed(folder / str(i), world_size))

    def launched(folder: Path) -> None:
        run_on_ranks(warm_up, 1)  # the fork server itself starts only once
        kills("launch", killed_under_launch, folder)

    parts: dict[str, Callable[[Path], None]] = {
        "saving": lambda folder: fill_saving(rows, run_on_ranks(timed_saving, world_size, folder, blocks)),
        "agreeing": lambda folder: fill_agreeing(rows, run_on_ranks(timed_agreement, world_size, blocks)),
        "torchrun": lambda folder: kills("torchrun", killed_under_torchrun, folder),
        "launch": launched,
    }
    for what, part in parts.items():
        mine = [row for key, row in rows.items() if key.startswith(what)]
        if any(plan.wants(row.key) for row in mine):
            show_progress(f"recovery: {what}")
            with tempfile.TemporaryDirectory() as folder, attempt(mine, what):
                part(Path(folder))
    return Result(TITLE, [row for row in rows.values() if plan.wants(row.key)], notes=NOTES)


def warm_up(rank: int, world_size: int) -> None:
    """Do nothing."""


def empty_rows(world_size: int) -> list[Row]:
    rows = [Row(f"saving_{way}", f"a step, {label}", world_size) for way, label in WAYS.items()]
    rows += [Row(f"saving_{way}_ratio", f"{WAYS[way]} / none", world_size, unit="") for way in SAVING]
    rows += [Row(f"saving_{way}_held_up", f"held up by {WAYS[way]}", world_size) for way in SAVING]
    rows += [Row(f"agreeing_{way}", label, world_size) for way, label in AGREE.items()]
    rows += [Row("agreeing_ratio", "with / without Cadence.next", world_size, unit="")]
    for who, parts in PARTS.items():
        rows += [Row(f"{who}_{part}", label, world_size) for part, label in parts.items()]
        rows += [Row(f"{who}_whole", f"{who}: from the kill to the first new step", world_size)]
    return rows


def fill_saving(rows: dict[str, Row], by_rank: list[dict[str, list[tuple[float, float]]]]) -> None:
    step, held_up = (
        slowest([{way: [block[which] for block in blocks] for way, blocks in found.items()} for found in by_rank])
        for which in (0, 1)
    )
    for way in WAYS:
        rows[f"saving_{way}"].samples += step[way]
    for way in SAVING:
        rows[f"saving_{way}_ratio"].samples += quotients(step[way], step["none"])
        rows[f"saving_{way}_held_up"].samples += held_up[way]


def fill_agreeing(rows: dict[str, Row], by_rank: list[Seconds]) -> None:
    step = slowest(by_rank)
    for way in AGREE:
        rows[f"agreeing_{way}"].samples += step[way]
    rows["agreeing_ratio"].samples += quotients(step["agreed"], step["alone"])


def fill_kill(rows: dict[str, Row], who: str, moments: dict[str, float]) -> None:
    """Turn the moments of one kill into the time of each part, and of the whole."""
    before = moments["killed"]
    for part in PARTS[who]:
        rows[f"{who}_{part}"].samples.append(moments[part] - before)
        before = moments[part]
    rows[f"{who}_whole"].samples.append(before - moments["killed"])
