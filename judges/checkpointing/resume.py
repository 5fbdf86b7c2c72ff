"""10.3 `RunFile(path)`: is everything in the file that a run needs, to go on as if nothing had happened?

The run has a part of each kind. A new run, seeded otherwise, is given the file, and each part is looked at; then it
goes on, and its last weights must be those of a run that was never stopped.

Read next: `grading/checking.py`, what becomes of all this.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.answer.limits import own_file
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.compare import close, flat
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
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
        "weights": {name: plain(value) for name, value in run.model.module.state_dict().items()},
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


def cases(rng: Random, folder: Path) -> list[Round]:
    """Stop within an epoch that is not the first; then load."""
    world_size, path, seed = rng.choice((2, 3)), str(folder / "run.pt"), rng.randint(1, 50)
    stop = BATCHES + rng.randint(2, BATCHES - 1)
    named = (("saved", Case(path, seed, stop, loads=False)), ("loaded", Case(path, seed, stop, loads=True)))
    return [Round(world_size, [each]) for each in named]


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


def file(seen: Seen) -> str:
    """What is wrong with the one file of plain data, written by rank 0."""
    path = Path(seen.case.path)
    others = any(other != path for other in path.parent.iterdir())
    if seen.rank or (writer := other_writer(seen)):
        return "" if seen.rank else writer
    return refusal(path) or ("another file, too" if others else "") if path.exists() else "no such file"


def refusal(path: Path) -> str:
    """Say what torch has against a file; nothing, if it can be loaded."""
    try:
        torch.load(own_file(path), weights_only=True)
    except Exception as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        return f"torch.load(weights_only=True) refuses {path.name}: {words[0][:80]}"
    return ""


def of_loaded(view: Callable[[Seen], Any]) -> Callable[[Seen], Any]:
    """A view of a run that has loaded; the saved one is named beside it, since without it there is no file."""
    return lambda seen: view(seen) if seen.case.loads else ""


def weights(seen: Seen) -> list[str]:
    """The names of what did not come back.

    Before each forward, DDP gives all ranks the batch norm's buffers of rank 0: those, or one's own, will do.
    """
    rights = [seen.of(rank)["right"]["weights"] for rank in (0, seen.rank)]
    return [name for name, found in seen["weights"].items() if found not in [right[name] for right in rights]]


def optimizer(seen: Seen) -> dict[str, Any]:
    momentum = "another" if any(seen["momentum"]) else "none"
    momentum = "as it was" if seen["momentum"] == seen["right"]["momentum"] else momentum
    return {"momentum": momentum, "learning rate, and steps of the schedule": seen["schedule"]}


def generators(seen: Seen) -> dict[str, str]:
    """Whose states a rank has."""

    def whose(kind: str) -> str:
        rights = [note["right"][kind] for note in seen.everyone]
        return f"rank {rights.index(seen[kind])}'s" if seen[kind] in rights else "another one"

    return {get: whose(kind) for get, kind in (("torch.get_rng_state", "torch"), ("random.getstate", "random"))}


def same(found: Any, right: Any, world_size: int) -> bool:
    """Compare bits; from three ranks on up to rounding, since a sum of three depends on the order of its additions."""
    return found == right if world_size == 2 else close(found, right, 1e-5)


def bits(seen: Seen) -> list[float] | str:
    return "the same" if same(seen["went_on"], seen["straight"], seen.world_size) else flat(seen["went_on"])


def said(seen: Seen) -> str:
    return f"rank {seen.rank}, after {'load' if seen.case.loads else 'save'}, as in the run that was not stopped:"


MISTAKES = """
every rank writes | file | gather on rank 0 what differs between the ranks, and let rank 0 write
    if dist.get_rank() == 0: => if True:
whole objects in the file | file | save state_dict()s, tensors, numbers, tuples, lists and dictionaries, no objects
    state.update(epoch => state.update(again=run.scheduler, epoch
    weights_only=True => weights_only=False
only parameters, no buffers | weights bits | load run.model's state_dict, parameters and buffers, into the new model
    getattr(run, part).load_state_dict(state[part]) => buffers = run.model.named_buffers() if part == "model" else ()
    getattr(run, part).load_state_dict({**state[part], **dict(buffers)})
the optimizer is forgotten | optimizer bits | save and load optimizer.state_dict(): without it, momentum begins at zero
    ("model", "optimizer", "scheduler"): => ("model", "scheduler"):
the schedule is forgotten | optimizer bits | without scheduler.state_dict(), the schedule counts from the start
    ("model", "optimizer", "scheduler"): => ("model", "optimizer"):
the epoch is repeated | position bits | the epoch is repeated from its start, so rows come twice; keep run.batch too
    run.epoch, run.batch = state["epoch"], state["batch"] => run.epoch = state["epoch"]
the next epoch begins | position bits | the rest of the epoch is left out; keep run.batch too
    run.epoch, run.batch = state["epoch"], state["batch"] => run.epoch = state["epoch"] + 1
the run begins with epoch 0 | position bits | the run begins again; keep run.epoch and run.batch
    run.epoch, run.batch = state["epoch"], state["batch"] => pass
the generators are forgotten | generators bits | save torch.get_rng_state() and random.getstate() on every rank
    torch.set_rng_state(of_torch) => pass
    random.setstate(of_python) => pass
torch's generator is forgotten | generators bits | save torch.get_rng_state() on every rank, and set it in load
    torch.set_rng_state(of_torch) => pass
Python's generator is forgotten | generators bits | save random.getstate() on every rank, and set it in load
    random.setstate(of_python) => pass
rank 0's generators | generators bits | gather the generators' states of all ranks, and give each its own back
    ["generators"][dist.get_rank()] => ["generators"][0]
save seeds torch | generators bits | save must leave the run as it is: look at what it seeds, draws or changes
    generators = [None] => torch.manual_seed(run.epoch)
    generators = [None]
gathered on rank 0 alone | all | every rank must take part in a gather | hangs
    dist.all_gather_object( => if dist.get_rank() == 0: dist.all_gather_object(
written freely: rank 0's generators alone | generators bits | give each its own back | tests
    class RunFile:
        def __init__(self, path):
            self.path = path

        def save(self, run):
            if dist.get_rank() == 0:
                parts = [getattr(run, name).state_dict() for name in ("model", "optimizer", "scheduler")]
                torch.save([*parts, run.epoch, run.batch, torch.get_rng_state(), random.getstate()], self.path)
            dist.barrier()

        def load(self, run):
            *states, run.epoch, run.batch, of_torch, of_python = torch.load(self.path, weights_only=True)
            for part, state in zip((run.model, run.optimizer, run.scheduler), states):
                part.load_state_dict(state)
            torch.set_rng_state(of_torch)
            random.setstate(of_python)
written freely: the weights alone | file optimizer position generators bits | let rank 0 write | tests
    class RunFile:
        def __init__(self, path):
            self.path = path

        def save(self, run):
            torch.save(run.model.module.state_dict(), self.path)

        def load(self, run):
            dist.barrier()
            run.model.module.load_state_dict(torch.load(self.path))
"""

RIGHT = """
the bare model's names, tensors gathered
    run.epoch, batch=run.batch => run.epoch, batch=run.batch, bare=run.model.module.state_dict()
    ("model", "optimizer", "scheduler"): => ("optimizer", "scheduler"):
        run.model.module.load_state_dict(state["bare"])
    dist.all_gather_object(generators, (torch.get_rng_state(), random.getstate())) => mine = torch.get_rng_state()
    rows = mine.repeat(len(generators), 1)
    dist.all_gather_into_tensor(rows, mine[None])
    dist.all_gather_object(generators, random.getstate())
    generators = [(row.clone(), numbers) for row, numbers in zip(rows, generators)]
"""


def lost(seen: Seen) -> str:
    if seen.case.loads:
        return "some part did not come back; the checks before this one say which"
    return "save must leave the run as it is: look at what it seeds, draws or changes"


RESUME = exercise(
    *("10.3", "Resume as if nothing had happened", "RunFile", 30),
    cases=cases,
    act=act,
    within=fresh_folder,
    said=said,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "file": ("rank 0 alone writes one file of plain data", 1, "saved", file,
                 "rank 0 writes to the path that is given: state_dict()s, tensors, numbers, tuples, lists"),
        "weights": ("weights and buffers come back", 1, "saved loaded", of_loaded(weights),
                    "load run.model's state_dict, parameters and buffers, into the new model"),
        "optimizer": ("optimizer and schedule come back", 1, "saved loaded", of_loaded(optimizer),
                      "save and load the state_dict() of both"),
        "position": ("epoch and batch come back", 1, "saved loaded", of_loaded(lambda seen: seen["position"]),
                     "set both run.epoch and run.batch"),
        "generators": ("each rank has its own generators back", 2, "saved loaded", generators,
                       "save the state of both on every rank, and set it as the last thing in load"),
        "bits": ("the resumed run is the uninterrupted one, bit for bit", 2, "saved loaded", bits, lost),
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
)  # fmt: skip
