"""14.2 `train_resumable(...)`: is a run that was killed and started again the run that was never stopped?

The kill is real: one rank sends SIGKILL to itself, in the middle of an epoch. At the entry of each step the run notes
which rows it was given and what it is made of: weights, momentum, the generator of dropout. So the first thing that
did not come back has a name, before it has become other weights.

Read next: `cadence.py`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from ddp_course.grading.compare import close
from ddp_course.grading.exercise import AnswerFailed, Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from judges.checkpointing.files import FileEvents, fresh_folder

BATCHES, ROWS = 5, 4  # of an epoch, of a batch on one rank

Note = dict[str, Any]


class Rows(Dataset):
    """Rows that know their number, which is the first value of x; notes which were read."""

    def __init__(self, length: int):
        self.values = torch.randn(length, 3, generator=torch.Generator().manual_seed(length))
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(int(row))
        x = self.values[row]
        return torch.cat([torch.tensor([float(row)]), x]), x.sum(0, keepdim=True)


class Run:
    """A training run with weights, momentum and dropout: what the learner's function is given."""

    def __init__(self, rank: int, world_size: int, seed: int, killed: tuple[int, int]):
        torch.manual_seed(seed)
        self.model = nn.parallel.DistributedDataParallel(
            nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 1))
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.local_batch = ROWS
        self.dataset = Rows(world_size * ROWS * BATCHES)
        torch.manual_seed(100 * seed + rank)  # each rank its own dropout
        self._rank, self._killed = rank, killed
        self._steps: list[Note] = []

    def train_on(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Take one step of SGD on a batch of this rank, with the other ranks."""
        dist.barrier()  # all are here, so nobody is writing, when the kill comes
        if (self._rank, len(self._steps)) == self._killed:
            os.kill(os.getpid(), signal.SIGKILL)
        self._steps.append({"rows": x[:, 0].int().tolist(), **self._made_of()})
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x[:, 1:]), y).backward()
        self.optimizer.step()

    def _made_of(self) -> Note:
        momentum = [self.optimizer.state.get(p, {}).get("momentum_buffer") for p in self.model.parameters()]
        return {
            "weights": _hash(self.model.parameters()),
            "momentum": _hash(m for m in momentum if m is not None),
            "generator": _hash([torch.get_rng_state()]),
        }


def _hash(tensors: Any) -> str:
    return hashlib.sha1(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def driver(
    rank: int, world_size: int, function: Callable, seed: int, plan: tuple[int, int], folder: str, killed: tuple
) -> Note:
    """Let the learner's function train; return its steps, the weights at the end, and what was read and written."""
    run = Run(rank, world_size, seed, killed)
    files = FileEvents(folder)
    function(rank, world_size, run, *plan, Path(folder))
    writes = sum(kind == "write" for kind, *_ in files.events)
    end = [p.tolist() for p in run.model.parameters()]
    return {"steps": run._steps, "end": end, "writes": writes, "read": run.dataset.read[:ROWS]}


def resume_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Train at a stretch; be killed after the second save, in the second epoch; go on; go on from a torn file."""
    world_size, every, steps = rng.choice((2, 3)), rng.choice((3, 4)), rng.randint(11, 14)
    last, seed = 2 * every, rng.randint(1, 40)
    killed, plan = (rng.randrange(world_size), last + 1), (steps, every)

    def run(folder: Path, seed: int, killed: tuple[int, int] = (-1, -1)) -> list[Note]:
        return answer.run(driver, world_size, seed, plan, str(folder), killed, init=True, fresh=True)

    with fresh_folder() as folder:
        straight = run(folder, seed)
        yield "straight", _straight_fault(straight, steps, world_size)
        yield "files", _files_fault(straight, folder, range(every, steps + 1, every))
    with fresh_folder() as folder, fresh_folder() as torn:
        _run_killed(lambda: run(folder, seed, killed))
        shutil.copytree(folder, torn, dirs_exist_ok=True)
        resumed = run(folder, seed + 1)
        yield "position", _first(_position_fault, straight, resumed, last)
        bits = _bits_fault(straight, resumed, last)
        yield "bits", bits
        yield "torn", _torn_fault(lambda: run(torn, seed + 2), torn, straight, (every, last), by_rows=bits is not None)


def _run_killed(run: Callable) -> None:
    try:
        run()
    except AnswerFailed as failed:
        if "killed by SIGKILL" not in failed.fault.report:  # not the killing that was meant
            raise


def _first(fault_of: Callable, straight: list[Note], resumed: list[Note], *args: int) -> Fault | None:
    faults = (fault_of(rank, straight, note, *args) for rank, note in enumerate(resumed))
    return next(filter(None, faults), None)


def _straight_fault(notes: list[Note], steps: int, world_size: int) -> Fault | None:
    for rank, note in enumerate(notes):
        if len(note["steps"]) != steps:
            cause = "begin at step 0 if the folder is empty, and go on from epoch to epoch until the step is reached"
            return Fault(f"{steps} steps", f"{len(note['steps'])} steps", rank, cause)
    epochs = [[note["steps"][i]["rows"] for note in notes for i in range(e, e + BATCHES)] for e in (0, BATCHES)]
    every_row = list(range(world_size * ROWS * BATCHES))
    for number, epoch in enumerate(epochs):
        rows = [row for batch in epoch for row in batch]
        if sorted(rows) != every_row:
            found = f"{len(set(rows))} of {len(every_row)} rows, in {len(rows)} places"
            cause = "deal the rows out as DistributedSampler does, in batches of run.local_batch"
            return Fault(f"epoch {number}: each row on one rank, once", found, cause=cause)
    if epochs[0] == epochs[1]:
        return Fault("another order in each epoch", "the same order", cause="sampler.set_epoch(epoch)")
    return None


def _files_fault(notes: list[Note], folder: Path, saved: range) -> Fault | None:
    names = [f"step-{step:06d}.pt" for step in saved]
    expected = f"the files {', '.join(names)}, written by rank 0"
    found = sorted(path.name for path in folder.iterdir())
    if found != names:
        cause = "save after every `every` steps, counted from the run's beginning, and keep all files"
        return Fault(expected, ", ".join(found) or "an empty folder", cause=cause)
    writer = next((rank for rank, note in enumerate(notes) if rank and note["writes"]), None)
    if writer is not None:
        cause = "gather on rank 0 what differs between the ranks, and let rank 0 write"
        return Fault(expected, "this rank opens a file for writing", writer, cause)
    try:
        torch.load(folder / names[0], weights_only=True)
    except Exception as error:
        cause = "save state_dict()s, tensors, numbers, lists and dictionaries, no objects"
        found = f"torch.load(weights_only=True) refuses {names[0]} ({type(error).__name__})"
        return Fault(expected, found, cause=cause)
    return None


def _position_fault(rank: int, straight: list[Note], note: Note, last: int) -> Fault | None:
    right = [step["rows"] for step in straight[rank]["steps"]]
    found = [step["rows"] for step in note["steps"]]
    expected = f"killed after step {last + 1}, saved at {last}: goes on with the rows of step {last + 1}"
    if found == right[last:]:
        if sorted(note["read"]) == sorted(found[0]):
            return None
        cause = "rows that were done are read once more and thrown away; leave their indices out, not their batches"
        return Fault(f"the first rows that are read are {found[0]}", f"{note['read']}", rank, cause)
    return Fault(expected, *_position_cause(right, found, last, rank))


def _position_cause(right: list, found: list, last: int, rank: int) -> tuple[str, int, str]:
    start = last - last % BATCHES
    if not found:
        return "no step at all", rank, "the file is not the end: train on until `steps`"
    where = next((step for step, rows in enumerate(right) if rows == found[0]), None)
    said = f"{len(found)} steps, the first on " + (f"the rows of step {where + 1}" if where is not None else "others")
    if where == 0:
        return said, rank, "the run begins anew; look for the newest file in the folder first"
    if where == start:
        return said, rank, "the epoch is repeated from its start, so rows come twice; skip those that are done"
    if where == start + BATCHES:
        return said, rank, "the rest of the epoch is left out; it has batches that nobody has seen"
    if where == last:
        return said, rank, "count on from the step in the file, to `steps` and not `steps` more, in the right epochs"
    if where is not None:
        return said, rank, "the file that was loaded is not the newest, or its step is wrong"
    return said, rank, "rows are skipped by another count than they were trained: done * run.local_batch on this rank"


def _bits_fault(straight: list[Note], resumed: list[Note], last: int) -> Fault | None:
    for rank, note in enumerate(resumed):
        if not note["steps"] or len(straight[rank]["steps"]) <= last:
            return Fault("the same bits as the run that was not killed", "no step", rank)
        right, found = straight[rank]["steps"][last], note["steps"][0]
        for part, cause in (
            ("weights", "load the model's state_dict, run.model.module, and save it after the step"),
            ("momentum", "save and load run.optimizer.state_dict()"),
            ("generator", _generator_cause(straight, found, last)),
        ):
            if found[part] != right[part]:
                if part == "weights" and found[part] == straight[rank]["steps"][last - 1][part]:
                    cause = "these are the weights from before that step: save after run.train_on, not before it"
                return Fault(f"step {last + 1} begins with the same {part}", "another one", rank, cause)
    for rank, note in enumerate(resumed):
        if not _same(note["end"], straight[rank]["end"], len(straight)):
            cause = "the first step begins as it should; what does the loop do otherwise than before, in later epochs?"
            return Fault("the same bits at the end as without the kill", "other weights", rank, cause)
    return None


def _generator_cause(straight: list[Note], found: Note, last: int) -> str:
    owner = next((r for r, note in enumerate(straight) if note["steps"][last]["generator"] == found["generator"]), None)
    if owner is not None:
        return "each rank draws its own dropout: save torch.get_rng_state() of all ranks, and give each its own back"
    return (
        "save torch.get_rng_state() of each rank and put it back. A DataLoader without a generator of its own draws "
        "from torch's whenever an epoch begins: DataLoader(..., generator=torch.Generator())"
    )


def _torn_fault(
    run: Callable, folder: Path, straight: list[Note], saved: tuple[int, int], by_rows: bool
) -> Fault | None:
    """Judge the run after the newest file was torn; `by_rows`: its values were judged before, and not found right."""
    before, newest = (folder / f"step-{step:06d}.pt" for step in saved)
    expected = f"{newest.name} is cut in half: the run goes on from step {saved[0]}"
    for path in (newest, before):
        if not path.exists():
            return Fault(expected, f"there is no {path.name}", cause="save after every `every` steps; keep all files")
    os.truncate(newest, newest.stat().st_size // 2)
    try:
        notes = run()
    except AnswerFailed as failed:
        cause = (
            "catch what torch.load raises for a torn file, and take the one before. By where it was cut, that is a "
            "RuntimeError, an EOFError or an OSError"
        )
        return Fault(expected, report=failed.fault.report, cause=cause)
    for rank, note in enumerate(notes):
        right = straight[rank]["steps"][saved[0] :]
        if [step["rows"] for step in note["steps"]] != [step["rows"] for step in right]:
            return Fault(expected, *_torn_cause(straight[rank], note, saved[0], rank))
        if by_rows:
            continue
        if note["steps"][0] != right[0] or not _same(note["end"], straight[rank]["end"], len(notes)):
            return Fault(expected, "it trains the right rows, and ends with other weights", rank)
    return None


def _torn_cause(straight: Note, note: Note, before: int, rank: int) -> tuple[str, int, str]:
    right, found = ([step["rows"] for step in run["steps"]] for run in (straight, note))
    said, rank, cause = _position_cause(right, found, before, rank)
    if found and found[0] == right[0]:  # also where an epoch begins that is repeated; then less is left to train
        anew = len(found) == len(right)
        cause = (
            "one torn file is no reason to begin anew: take the one before"
            if anew
            else "the epoch is repeated from its start, so rows come twice; skip those that are done"
        )
    return said, rank, cause


def _same(found: list, right: list, world_size: int) -> bool:
    """Compare bits; from three ranks on up to rounding, since a sum of three depends on the order of its additions."""
    return found == right if world_size == 2 else close(found, right, 1e-5)


RESUME = Exercise(
    "14.2",
    "Killed within an epoch",
    "train_resumable",
    35,
    (
        Check("straight", "a run that nobody kills", 1),
        Check("files", "one file at each save, from rank 0", 1),
        Check("position", "killed and started again: no row twice, none left out", 2),
        Check("bits", "the same bits as without the kill", 2),
        Check("torn", "the newest file is torn: on from the one before", 1),
    ),
    resume_judge,
    refused=(
        "ddp_course.checkpoint.folder.Checkpointer",
        "ddp_course.checkpoint.state.capture_state",
        "ddp_course.checkpoint.state.restore_state",
    ),
    hints=(
        (r"(?s)weights_only|WeightsUnpickler", "the file holds objects; save state_dict()s, tensors and numbers"),
        (r"Missing key|Unexpected key", "save and load run.model.module.state_dict(), the bare model's names"),
        (
            r"never entered|disagree about|lost the connection",
            "a collective that not every rank calls, as within `if rank == 0`: every rank must take part in a "
            "gather, and train as many steps",
        ),
        (r"no result after", "a loop that never reaches `steps`, or a collective that not every rank calls"),
        (r"No such file|FileNotFoundError", "on the first start the folder is empty; then begin at step 0"),
    ),
)
