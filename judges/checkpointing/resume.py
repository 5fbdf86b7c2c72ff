"""10.3 `RunFile(path)`: is everything in the file that a run needs, to go on as if nothing had happened?

The run has a part of each kind. A new run, seeded otherwise, is given the file, and each part is looked at; then it
goes on, and its last weights must be those of a run that was never stopped.

Read next: `repair.py`.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ddp_course.grading.compare import close
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from judges.checkpointing.files import FileEvents, fresh_folder

BATCHES, ROWS = 5, 4  # of an epoch, of a batch on one rank
MORE = 4  # steps after the file was written
LAST_S = 0.4  # rank 0 writes last, so that others who write too do harm to one check only

Note = dict[str, Any]


class Run:
    """A training run with all the state there is: what the learner's `RunFile` is given."""

    def __init__(self, rank: int, world_size: int, seed: int):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 1))
        self.model = nn.parallel.DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.7)
        self.epoch = self.batch = 0
        self._rank, self._size = rank, world_size
        torch.manual_seed(100 * seed + rank)  # each rank its own dropout
        random.seed(100 * seed + rank)  # and its own noise

    def step(self) -> None:
        """Train on the next batch of this epoch, or on the first of the next one."""
        rows = torch.Generator().manual_seed(1000 * self.epoch + 10 * self.batch + self._rank)
        x = torch.randn(ROWS, 4, generator=rows) + 0.1 * random.random()
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x), x.sum(1, keepdim=True)).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.batch += 1
        if self.batch == BATCHES:
            self.epoch, self.batch = self.epoch + 1, 0


def save_driver(rank: int, world_size: int, function: Callable, path: str, seed: int, stop: int) -> Note:
    """Train at a stretch, and again with a file written on the way; the writing must not change the run."""
    straight = Run(rank, world_size, seed)
    _train(straight, stop)
    at_stop = _parts(straight)
    _train(straight, MORE)
    run = Run(rank, world_size, seed)
    _train(run, stop)
    files = FileEvents(os.path.dirname(path), LAST_S if rank == 0 else 0.0)
    function(path).save(run)
    writes = sum(kind == "write" for kind, *_ in files.events)
    _train(run, MORE)
    return {"at_stop": at_stop, "end": _weights(straight), "went_on": _weights(run), "writes": writes}


def resume_driver(rank: int, world_size: int, function: Callable, path: str, seed: int) -> Note:
    """Give the file to a run that is seeded otherwise, look at its parts, and let it go on."""
    run = Run(rank, world_size, seed)
    function(path).load(run)
    parts = _parts(run)
    _train(run, MORE)
    return {"parts": parts, "end": _weights(run)}


def _train(run: Run, steps: int) -> None:
    for _ in range(steps):
        run.step()


def _weights(run: Run) -> list:
    return [value.tolist() for value in run.model.module.state_dict().values()]


def _parts(run: Run) -> Note:
    return {
        "weights": _weights(run),
        "momentum": [
            None if (m := run.optimizer.state.get(p, {}).get("momentum_buffer")) is None else m.tolist()
            for p in run.model.parameters()
        ],
        "schedule": [run.optimizer.param_groups[0]["lr"], run.scheduler.last_epoch],
        "position": [run.epoch, run.batch],
        "torch": hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "random": hashlib.sha1(repr(random.getstate()).encode()).hexdigest(),
    }


def resume_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Stop within an epoch that is not the first, and go on in new processes."""
    world_size, seed = rng.choice((2, 3)), rng.randint(1, 50)
    stop = BATCHES + rng.randint(2, BATCHES - 1)
    with fresh_folder() as folder:
        path = str(folder / "run.pt")
        before = answer.run(save_driver, world_size, path, seed, stop, init=True)
        yield "file", _file_fault(path, before)
        after = answer.run(resume_driver, world_size, path, seed + 1, init=True)
    rights, founds = [note["at_stop"] for note in before], [note["parts"] for note in after]
    yield "weights", _first(_weights_fault, rights, founds)
    yield "optimizer", _first(_optimizer_fault, rights, founds)
    yield "position", _first(_position_fault, rights, founds)
    yield "generators", _first(_generators_fault, rights, founds)
    yield "bits", _bits_fault(before, after)


def _first(fault_of: Callable, rights: list[Note], founds: list[Note]) -> Fault | None:
    faults = (fault_of(rank, rights, found) for rank, found in enumerate(founds))
    return next(filter(None, faults), None)


def _file_fault(path: str, notes: list[Note]) -> Fault | None:
    expected = "one file of plain data, written by rank 0"
    others = [name for name in os.listdir(os.path.dirname(path)) if name != os.path.basename(path)]
    writer = next((rank for rank, note in enumerate(notes) if rank > 0 and note["writes"]), None)
    if writer is not None:
        cause = "gather on rank 0 what differs between the ranks, and let rank 0 write"
        return Fault(expected, "this rank opens a file for writing", writer, cause)
    if others or not os.path.exists(path):
        found = f"also {others[0]}" if os.path.exists(path) else "no such file"
        return Fault(expected, found, cause="write to the path that is given")
    try:
        torch.load(path, weights_only=True)
    except Exception as error:
        cause = "save state_dict()s, tensors, numbers, tuples, lists and dictionaries, no objects"
        return Fault(expected, f"torch.load(weights_only=True) refuses it: {_line(error)}", cause=cause)
    return None


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:80] if str(error).strip() else type(error).__name__


def _weights_fault(rank: int, rights: list[Note], found: Note) -> Fault | None:
    # Before each forward, DDP gives all ranks the batch norm's buffers of rank 0: those, or one's own, will do.
    if found["weights"] in (rights[0]["weights"], rights[rank]["weights"]):
        return None
    cause = "load run.model's state_dict, parameters and buffers, into the new model"
    return Fault("the weights and buffers of the run that was saved", "others", rank, cause)


def _optimizer_fault(rank: int, rights: list[Note], found: Note) -> Fault | None:
    right = rights[rank]
    if found["momentum"] != right["momentum"]:
        empty = all(each is None for each in found["momentum"])
        cause = "save and load optimizer.state_dict(): without it, momentum begins at zero"
        return Fault("momentum as it was", "no momentum" if empty else "another momentum", rank, cause)
    if found["schedule"] != right["schedule"]:
        cause = "save and load scheduler.state_dict(): without it, the schedule counts from the start"
        shown = "a schedule that has done {1} steps (rate {0:.4g})".format
        return Fault(shown(*right["schedule"]), shown(*found["schedule"]), rank, cause)
    return None


def _position_fault(rank: int, rights: list[Note], found: Note) -> Fault | None:
    (epoch, batch), (at_epoch, at_batch) = rights[rank]["position"], found["position"]
    if (epoch, batch) == (at_epoch, at_batch):
        return None
    if (at_epoch, at_batch) == (epoch, 0):
        cause = "the epoch is repeated from its start, so some rows come twice; keep run.batch too"
    elif (at_epoch, at_batch) == (epoch + 1, 0):
        cause = "the rest of the epoch is left out; keep run.batch too"
    elif (at_epoch, at_batch) == (0, 0):
        cause = "the run begins anew; keep run.epoch and run.batch"
    else:
        cause = "set both run.epoch and run.batch"
    return Fault(f"epoch {epoch}, batch {batch}", f"epoch {at_epoch}, batch {at_batch}", rank, cause)


def _generators_fault(rank: int, rights: list[Note], found: Note) -> Fault | None:
    for kind, get in (("torch", "torch.get_rng_state()"), ("random", "random.getstate()")):
        if found[kind] == rights[rank][kind]:
            continue
        owner = next((other for other, right in enumerate(rights) if right[kind] == found[kind]), None)
        if owner is not None:
            cause = "every rank draws numbers of its own: gather the states of all ranks, and give each its own back"
            return Fault(f"{get} of rank {rank}", f"that of rank {owner}", rank, cause)
        cause = f"save {get} on every rank, and set it as the last thing in load: other calls may draw from it"
        return Fault(f"{get} as it was", "another state", rank, cause)
    return None


def _same(found: list, right: list, world_size: int) -> bool:
    """Compare bits; from three ranks on up to rounding, since a sum of three depends on the order of its additions."""
    return found == right if world_size == 2 else close(found, right, 1e-5)


def _bits_fault(before: list[Note], after: list[Note]) -> Fault | None:
    for rank, note in enumerate(before):
        if not _same(note["went_on"], note["end"], len(before)):
            cause = "save must leave the run as it is: look at what it seeds, draws or changes"
            return Fault("the run that was saved goes on as one that was not", "another run", rank, cause)
    for rank, note in enumerate(after):
        if not _same(note["end"], before[rank]["end"], len(before)):
            cause = "some part did not come back; the checks before this one say which"
            return Fault(f"the same bits after {MORE} more steps", "other weights", rank, cause)
    return None


RESUME = Exercise(
    "10.3",
    "Resume as if nothing had happened",
    "RunFile",
    30,
    (
        Check("file", "rank 0 alone writes one file of plain data", 1),
        Check("weights", "weights and buffers come back", 1),
        Check("optimizer", "optimizer and schedule come back", 1),
        Check("position", "epoch and batch come back", 1),
        Check("generators", "each rank has its own generators back", 2),
        Check("bits", "the resumed run is the uninterrupted one, bit for bit", 2),
    ),
    resume_judge,
    refused=(
        "ddp_course.checkpoint.state.capture_state",
        "ddp_course.checkpoint.state.restore_state",
        "ddp_course.checkpoint.state.rng_state",
        "ddp_course.checkpoint.state.set_rng_state",
        "ddp_course.checkpoint.folder.Checkpointer",
    ),
    hints=(
        (
            r"(?s)weights_only|WeightsUnpickler",
            "the file holds objects; save state_dict()s, tensors, numbers and tuples",
        ),
        (
            r"Missing key|Unexpected key",
            "the names in the file and in the model differ; save and load run.model.module.state_dict()",
        ),
        (
            r"never entered|disagree about|no result after",
            "a collective within `if rank == 0`; every rank must take part in a gather",
        ),
        (
            r"RNG state must be|state vector|ByteTensor",
            "a generator's state is a tensor of bytes on the CPU, and Python's a tuple",
        ),
    ),
)
