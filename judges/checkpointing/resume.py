"""10.3 `RunFile(path)`: is everything in the file that a run needs, to go on as if nothing had happened?

The run has a part of each kind. A new run, seeded otherwise, is given the file, and each part is looked at; then it
goes on, and its last weights must be those of a run that was never stopped.

Read next: `grading/checking.py`, what becomes of all this.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.answer.limits import own_file
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import close
from ddp_course.grading.vocabulary.expect import equals, exercise, first_mistake, once
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.checkpointing.files import file_events, fresh_folder, other_writer

BATCHES, ROWS = 5, 4  # of an epoch, of a batch on one rank
MORE = 4  # steps after the file was written
LAST_S = 0.4  # rank 0 writes last, so that others who write too do harm to one check only


class Run:
    """A training run with all the state there is: what the learner's `RunFile` is given."""

    def __init__(self, rank: int, world_size: int, seed: int):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 1))
        self.model = nn.parallel.DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.7)
        self.epoch = self.batch = 0
        self._rank = rank
        torch.manual_seed(100 * seed + rank)  # each rank its own dropout
        random.seed(100 * seed + rank)  # and its own noise

    def train(self, steps: int) -> None:
        """Train on the next batches of this epoch, and of the ones after it."""
        for _ in range(steps):
            rows = torch.Generator().manual_seed(1000 * self.epoch + 10 * self.batch + self._rank)
            x = torch.randn(ROWS, 4, generator=rows) + 0.1 * random.random()
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), x.sum(1, keepdim=True)).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.epoch, self.batch = divmod(self.epoch * BATCHES + self.batch + 1, BATCHES)


def parts(run: Run) -> dict[str, Any]:
    """Return all that a run needs to go on, as plain data."""
    momentum = [run.optimizer.state.get(p, {}).get("momentum_buffer") for p in run.model.parameters()]
    return {
        "weights": plain(list(run.model.module.state_dict().values())),
        "momentum": plain(momentum),
        "schedule": [run.optimizer.param_groups[0]["lr"], run.scheduler.last_epoch],
        "position": [run.epoch, run.batch],
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
    }


@dataclass(frozen=True)
class Case:
    """Where the file is; a run is stopped after so many steps to save, or a new one, seeded otherwise, loads."""

    path: str
    seed: int
    stop: int
    loads: bool


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Train at a stretch, and again with the file written, or loaded, on the way."""
    straight = Run(rank, world_size, case.seed)
    straight.train(case.stop)
    right = parts(straight)
    straight.train(MORE)
    end = parts(straight)
    run = Run(rank, world_size, case.seed + case.loads)
    run.train(0 if case.loads else case.stop)
    with file_events(function, case.path, 0 if rank else LAST_S) as events:
        file = function(case.path)
        file.load(run) if case.loads else file.save(run)
    found = parts(run)
    run.train(MORE)
    return Note(found, right=right, went_on=parts(run)["weights"], straight=end["weights"], events=events)


def rounds(rng: Random, folder: Path) -> list[Round]:
    """Stop within an epoch that is not the first; then load."""
    world_size, path, seed = rng.choice((2, 3)), str(folder / "run.pt"), rng.randint(1, 50)
    stop = BATCHES + rng.randint(2, BATCHES - 1)
    return [
        Round(world_size, [("saved", Case(path, seed, stop, loads=False))]),
        Round(world_size, [("loaded", Case(path, seed, stop, loads=True))]),
    ]


BATCH_TOO = "keep run.batch too"


def file(seen: Seen) -> Fault | None:
    """One file, of plain data, written by rank 0."""
    path = Path(seen.case.path)
    others = [other.name for other in path.parent.iterdir() if other != path]
    return first_mistake("one file of plain data, written by rank 0", {
        "gather on rank 0 what differs between the ranks, and let rank 0 write": other_writer(seen),
        "write to the path that is given": others and f"also {others[0]}" if path.exists() else "no such file",
        "save state_dict()s, tensors, numbers, tuples, lists and dictionaries, no objects": refusal(path),
    })  # fmt: skip


def refusal(path: Path) -> str:
    """Say what torch has against a file; nothing, if it can be loaded."""
    try:
        torch.load(own_file(path), weights_only=True)
    except Exception as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        return f"torch.load(weights_only=True) refuses {path.name}: {words[0][:80]}"
    return ""


def weights(seen: Seen) -> Fault | None:
    """The weights and buffers came back."""
    # Before each forward, DDP gives all ranks the batch norm's buffers of rank 0: those, or one's own, will do.
    lost = seen["weights"] not in [seen.of(rank)["right"]["weights"] for rank in (0, seen.rank)]
    cause = "load run.model's state_dict, parameters and buffers, into the new model"
    return first_mistake("the weights and buffers of the run that was saved", {cause: lost and "others"}, seen.rank)


def optimizer(seen: Seen) -> Fault | None:
    """Momentum and schedule came back."""
    right, schedule = seen["right"], "a schedule that has done {1} steps (rate {0:.4g})".format
    return first_mistake(f"momentum as it was, and {schedule(*right['schedule'])}", {
        "save and load optimizer.state_dict(): without it, momentum begins at zero":
            seen["momentum"] != right["momentum"] and f"{'another' if any(seen['momentum']) else 'no'} momentum",
        "save and load scheduler.state_dict(): without it, the schedule counts from the start":
            seen["schedule"] != right["schedule"] and schedule(*seen["schedule"]),
    }, seen.rank)  # fmt: skip


position = equals(
    "epoch and batch",
    lambda seen: seen["right"]["position"],
    lambda seen: [
        (f"the epoch is repeated from its start, so some rows come twice; {BATCH_TOO}", [seen.case.stop // BATCHES, 0]),
        (f"the rest of the epoch is left out; {BATCH_TOO}", [seen.case.stop // BATCHES + 1, 0]),
        ("the run begins again; keep run.epoch and run.batch", [0, 0]),
    ],
    "set both run.epoch and run.batch",
    of="position",
)


def generators(seen: Seen) -> Fault | None:
    """Each rank has the states that it had."""
    for kind, get in (("torch", "torch.get_rng_state()"), ("random", "random.getstate()")):
        rights = [note["right"][kind] for note in seen.everyone]
        if seen[kind] != rights[seen.rank]:
            return first_mistake(f"{get} of rank {seen.rank}, as it was", {
                "every rank draws numbers of its own: gather the states of all ranks, and give each its own back":
                    seen[kind] in rights and f"that of rank {rights.index(seen[kind])}",
                f"save {get} on every rank, and set it as the last thing in load: other calls may draw from it":
                    "another state",
            }, seen.rank)  # fmt: skip
    return None


def same(found: list, right: list, world_size: int) -> bool:
    """Compare bits; from three ranks on up to rounding, since a sum of three depends on the order of its additions."""
    return found == right if world_size == 2 else close(found, right, 1e-5)


def bits(seen: Seen) -> Fault | None:
    """The run ends as the one that was neither saved nor loaded."""
    other = not same(seen["went_on"], seen["straight"], seen.world_size)
    return first_mistake(f"the same bits after {MORE} more steps as without the file", {
        "save must leave the run as it is: look at what it seeds, draws or changes":
            other and not seen.case.loads and "another run",
        "some part did not come back; the checks before this one say which": other and "other weights",
    }, seen.rank)  # fmt: skip


RESUME = exercise(
    "10.3",
    "Resume as if nothing had happened",
    "RunFile",
    30,
    act=act,
    rounds=rounds,
    within=fresh_folder,
    checks={
        "file": ("rank 0 alone writes one file of plain data", 1, once(file), "saved"),
        "weights": ("weights and buffers come back", 1, weights, "loaded"),
        "optimizer": ("optimizer and schedule come back", 1, optimizer, "loaded"),
        "position": ("epoch and batch come back", 1, position, "loaded"),
        "generators": ("each rank has its own generators back", 2, generators, "loaded"),
        "bits": ("the resumed run is the uninterrupted one, bit for bit", 2, bits, "saved loaded"),
    },
    refused=(
        *(f"ddp_course.checkpoint.state.{name}" for name in ("capture_state", "restore_state", "rng_state")),
        *("ddp_course.checkpoint.state.set_rng_state", "ddp_course.checkpoint.folder.Checkpointer"),
    ),
    hints={
        r"(?s)weights_only|WeightsUnpickler": "the file holds objects; save state_dict()s, tensors, numbers and tuples",
        r"(?s)killed by SIGSEGV.*set_rng_state": "torch.set_rng_state reads memory from its beginning, also when it is "
        "given a row of a larger tensor: give it a clone",
        r"Missing key|Unexpected key": "the names in the file and in the model differ; save and load "
        "run.model.module.state_dict()",
        "absent|disagree|limit": "a collective within `if rank == 0`; every rank must take part in a gather",
        r"RNG state must be|state vector|ByteTensor": "a generator's state is a tensor of bytes on the CPU, and "
        "Python's a tuple",
    },
)
