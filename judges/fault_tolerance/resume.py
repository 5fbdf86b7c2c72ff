"""15.2 `train_resumable(...)`: is a run that was killed and started again the run that was never stopped?

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
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.expect import Ending, exercise, first_mistake, once
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.checkpointing.files import file_events, fresh_folder, other_writer
from judges.checkpointing.resume import refusal, same

BATCHES, ROWS = 5, 4  # of an epoch, of a batch on one rank


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
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 1))
        self.model = nn.parallel.DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.local_batch = ROWS
        self.dataset = Rows(world_size * ROWS * BATCHES)
        torch.manual_seed(100 * seed + rank)  # each rank its own dropout
        self._rank, self._killed = rank, killed
        self._steps: list[dict[str, Any]] = []

    def train_on(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Take one step of SGD on a batch of this rank, with the other ranks."""
        dist.barrier()  # all are here, so nobody is writing, when the kill comes
        if (self._rank, len(self._steps)) == self._killed:
            os.kill(os.getpid(), signal.SIGKILL)
        momentum = (self.optimizer.state.get(p, {}).get("momentum_buffer") for p in self.model.parameters())
        made_of = {"weights": self.model.parameters(), "momentum": momentum, "generator": [torch.get_rng_state()]}
        hashes = {part: _hash(tensors) for part, tensors in made_of.items()}
        self._steps.append({"rows": x[:, 0].int().tolist(), **hashes})
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x[:, 1:]), y).backward()
        self.optimizer.step()


def _hash(tensors: Iterable[torch.Tensor | None]) -> str:
    return hashlib.sha1(b"".join(t.detach().numpy().tobytes() for t in tensors if t is not None)).hexdigest()


@dataclass(frozen=True)
class Case:
    """A run, named by its kind: "straight", "killed", "resumed" from there, at an "edge" of epochs, or "torn"."""

    kind: str
    folder: Path
    seed: int
    steps: int
    every: int
    killed: tuple[int, int]  # a rank, and the steps that it has done

    @property
    def saved(self) -> int:
        """The steps done in the file from which the run is resumed."""
        return self.every if self.kind == "edge" else 2 * self.every

    def file(self, folder: str, times: int) -> Path:
        """Return the file of the first or the second save."""
        return self.folder / folder / f"step-{times * self.every:06d}.pt"


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Train at a stretch; to see what comes after a kill, also from the files that it left."""

    def trained(folder: str, seed: int, killed: tuple[int, int] = (-1, -1)) -> dict[str, Any]:
        run, path = Run(rank, world_size, seed, killed), case.folder / folder
        path.mkdir(exist_ok=True)
        with file_events(function, str(path / "any")) as events:
            function(rank, world_size, run, case.steps, case.every, path)
        return {"steps": run._steps, "end": tasks.weights(run.model), "events": events, "read": run.dataset.read[:ROWS]}

    if case.kind == "killed":
        return Note(trained("killed", case.seed, case.killed))
    straight = trained(case.kind, case.seed)
    if case.kind == "straight":
        if case.steps % case.every:
            return Note(straight)
        dist.barrier()  # where other ranks write, too, they have done so
        if rank == 0:
            shutil.copytree(case.folder / "straight", case.folder / "done")
        dist.barrier()
        return Note(straight, more=len(trained("done", case.seed + 1)["steps"]))
    if case.kind == "edge":
        if not case.file("edge", 1).exists():
            return Note(missing=True)
        dist.barrier()  # all have looked
        if rank == 0:
            case.file("after", 1).parent.mkdir()
            shutil.copy(case.file("edge", 1), case.file("after", 1))
        dist.barrier()
        return Note(trained("after", case.seed + 1), straight=straight)
    before, newest = case.file("left", 1), case.file("left", 2)
    if case.kind == "resumed":
        if rank == 0:
            shutil.copytree(case.folder / "killed", before.parent)
        dist.barrier()
        return Note(trained("killed", case.seed + 1), straight=straight)
    if missing := next((path.name for path in (newest, before) if not path.exists()), ""):
        return Note(missing=missing)
    dist.barrier()  # all have looked
    if rank == 0:
        for folder in ("whole", "empty"):
            case.file(folder, 1).parent.mkdir()
            shutil.copy(before, case.file(folder, 1))
        case.file("empty", 2).touch()
        os.truncate(newest, newest.stat().st_size // 2)
    dist.barrier()
    note = Note(trained("left", case.seed + 2), straight=straight)
    return Note(note, **{folder: trained(folder, case.seed + 2) for folder in ("whole", "empty")})


def rounds(rng: Random, folder: Path) -> list[Round]:
    """Train at a stretch; be killed after the second save, in the second epoch; go on; go on from a torn file."""
    world_size, every, steps = rng.choice((2, 3)), rng.choice((3, 4)), rng.choice((11, 13, 14))
    common = folder, rng.randint(1, 40), steps, every, (rng.randrange(world_size), 2 * every + 1)
    how = {"killed": "killed by SIGKILL", "torn": ""}
    cases = {kind: [(kind, Case(kind, *common))] for kind in ("straight", "killed", "resumed", "torn")}
    (other := folder / "other").mkdir()
    cases["straight"].append(("straight", Case("straight", other, 7, 12, every, (-1, -1))))  # the last step is saved
    cases["edge"] = [("edge", replace(cases["straight"][0][1], kind="edge", every=BATCHES))]
    return [
        Ending(world_size, case, fresh=True, how=how[kind]) if kind in how else Round(world_size, case, fresh=True)
        for kind, case in cases.items()
    ]


# --- What is expected ------------------------------------------------------------------------------


def straight(seen: Seen) -> Fault | None:
    """All steps are trained, on all rows."""
    counts, n_rows = [len(note["steps"]) for note in seen.everyone], seen.world_size * ROWS * BATCHES
    epochs = [[step["rows"] for n in seen.everyone for step in n["steps"][e : e + BATCHES]] for e in (0, BATCHES)]
    wrong = next((rows for rows in (sum(epoch, []) for epoch in epochs) if sorted(rows) != list(range(n_rows))), None)
    return first_mistake(f"{seen.case.steps} steps; each row once in an epoch, in another order in each", {
        "begin at step 0 if the folder is empty, and go on from epoch to epoch until the step is reached":
            counts != [seen.case.steps] * seen.world_size and f"on the ranks {counts} steps",
        "deal the rows out as DistributedSampler does, in batches of run.local_batch":
            wrong is not None and f"{len(set(wrong))} of {n_rows} rows, in {len(wrong)} places",
        "sampler.set_epoch(epoch)": epochs[0] == epochs[1] and "the same order",
    })  # fmt: skip


def files(seen: Seen) -> Fault | None:
    """Rank 0 has written a file at each save."""
    names = [seen.case.file("", times + 1).name for times in range(seen.case.steps // seen.case.every)]
    folder = seen.case.folder / "straight"
    found = sorted(path.name for path in folder.iterdir())
    return first_mistake(f"the files {', '.join(names)}, written by rank 0", {
        "save after every `every` steps, counted from the run's beginning, and keep all files":
            found != names and (", ".join(found) or "an empty folder"),
        "gather on rank 0 what differs between the ranks, and let rank 0 write": other_writer(seen),
        "save state_dict()s, tensors, numbers, lists and dictionaries, no objects": refusal(folder / names[0]),
    })  # fmt: skip


def went_on(seen: Seen, expected: str, at: int) -> Fault | None:
    """The rows are those of a run that goes on from step `at`."""
    right, found = ([step["rows"] for step in note["steps"]] for note in (seen["straight"], seen))
    if found == right[at:]:
        return None
    start = at - at % BATCHES
    where = right.index(found[0]) if found and found[0] in right else None
    said = f"{len(found)} steps, the first on {'others' if where is None else f'the rows of step {where + 1}'}"
    return first_mistake(f"{expected}: goes on with the rows of step {at + 1}", {
        "the file is not the end: train on until `steps`": not found and "no step at all",
        "one torn file is no reason to begin again: take the one before":
            where == start == 0 and len(found) == len(right) and said,
        "the epoch is repeated from its start, so rows come twice; skip those that are done": where == start and said,
        "the run begins again; look for the newest file in the folder first": where == 0 and said,
        "the rest of the epoch is left out; it has batches that nobody has seen": where == start + BATCHES and said,
        "count on from the step in the file, to `steps` and not `steps` more, in the right epochs":
            where == at and said,
        "the file that was loaded is not the newest, or its step is wrong": where is not None and said,
        "rows are skipped by another count than they were trained: done * run.local_batch on this rank": said,
    }, seen.rank)  # fmt: skip


def position(seen: Seen) -> Fault | None:
    """No row comes twice, and none is left out."""
    at = 2 * seen.case.every
    if seen.case.kind in ("killed", "straight"):
        found = seen["more"] and f"{seen['more']} steps more"
        return first_mistake("no step when all are done", {"look for the newest file in the folder first": found})
    if fault := went_on(seen, f"killed after step {at + 1}, saved at {at}", at):
        return fault
    first = seen["steps"][0]["rows"]
    cause = "rows that were done are read once more and thrown away; leave their indices out, not their batches"
    found = sorted(seen["read"]) != sorted(first) and f"{seen['read']}"
    return first_mistake(f"the first rows that are read are {first}", {cause: found}, seen.rank)


def bits(seen: Seen) -> Fault | None:
    """The first step after the kill, and the end, are those of the run that was not killed."""
    if seen["missing"]:
        return None  # the files are a check of their own
    at, right = seen.case.saved, seen["straight"]["steps"]
    if not seen["steps"] or len(right) <= at:
        return Fault("the same bits as the run that was not killed", "no step", seen.rank)

    def other(part: str, note: Any = seen) -> str:
        begins = [[step[part] for step in steps] for steps in (note["steps"][:1], note["straight"]["steps"][at:][:1])]
        return "" if begins[0] == begins[1] else f"step {at + 1} begins with other {part}"

    found, parts = seen["steps"][0], ("weights", "momentum", "generator")
    begun = not any(other(part, note) for note in seen.everyone for part in parts)
    drawn = [step["generator"] for note in seen.everyone for step in note["straight"]["steps"][at:][:1]]
    return first_mistake("the same weights, momentum and generator as in the run that was not killed", {
        "these are the weights from before that step: save after run.train_on, not before it":
            found["weights"] == right[at - 1]["weights"] and other("weights"),
        "load the model's state_dict, run.model.module, and save it after the step": other("weights"),
        "save and load run.optimizer.state_dict()": other("momentum"),
        "each rank draws its own dropout: save torch.get_rng_state() of all ranks, and give each its own back":
            found["generator"] in drawn and other("generator"),
        "save torch.get_rng_state() of each rank and put it back. A DataLoader without a generator of its own draws "
        "from torch's whenever an epoch begins: DataLoader(..., generator=torch.Generator())": other("generator"),
        "the first step begins as it should; what does the loop do otherwise than before, in later epochs?":
            begun and not same(seen["end"], seen["straight"]["end"], seen.world_size) and "other weights at the end",
    }, seen.rank)  # fmt: skip


def torn(seen: Seen) -> Fault | None:
    """A torn file counts as none."""
    expected = f"{seen.case.file('', 2).name} is cut in half"
    if seen["ended"]:
        cause = (
            "catch what torch.load raises for a torn file, and take the one before. By where it was cut, that is a "
            "RuntimeError, an EOFError or an OSError"
        )
        return Fault(f"{expected}: the run goes on from the one before", report=seen["ended"].report, cause=cause)
    if seen["missing"]:
        found, cause = f"there is no {seen['missing']}", "save after every `every` steps; keep all files"
        return Fault(f"{expected}: the run goes on from the one before", found, cause=cause)
    if fault := went_on(seen, expected, seen.case.every):
        return fault
    whole = seen["whole"]
    alike = all(
        note["steps"][:1] == whole["steps"][:1] and same(note["end"], whole["end"], seen.world_size)
        for note in (seen.everyone[seen.rank], seen["empty"])
    )
    cause = "load the parts of a file when all of it was read"
    found = not alike and "it trains the right rows, and ends with other weights"
    return first_mistake(f"{expected}: the run goes on as if it were not there", {cause: found}, seen.rank)


RESUME = exercise(
    "15.2",
    "Killed within an epoch",
    "train_resumable",
    35,
    act=act,
    rounds=rounds,
    within=fresh_folder,
    checks={
        "straight": ("a run that nobody kills", 1, once(straight), "straight"),
        "files": ("one file at each save, from rank 0", 1, once(files), "straight"),
        "position": ("killed and started again: no row twice, none left out", 2, position, "killed resumed straight"),
        "bits": ("the same bits as without the kill", 2, bits, "resumed edge"),
        "torn": ("the newest file is torn: on from the one before", 1, torn, "torn"),
    },
    refused=(
        *("ddp_course.checkpoint.folder.Checkpointer", "ddp_course.checkpoint.state.capture_state"),
        "ddp_course.checkpoint.state.restore_state",
    ),
    hints={
        r"(?s)weights_only|WeightsUnpickler": "the file holds objects; save state_dict()s, tensors and numbers",
        r"(?s)killed by SIGSEGV.*set_rng_state": "torch.set_rng_state reads memory from its beginning, also when it is "
        "given a row of a larger tensor: give it a clone",
        r"Missing key|Unexpected key": "save and load run.model.module.state_dict(), the bare model's names",
        "absent|disagree|cut-off": "a collective that not every rank calls, as within "
        "`if rank == 0`: every rank must take part in a gather, and train as many steps",
        "limit": "a loop that never reaches `steps`, or a collective that not every rank calls",
        r"No such file|FileNotFoundError": "on the first start the folder is empty; then begin at step 0",
    },
)
