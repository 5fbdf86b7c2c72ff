"""15.2 `train_resumable(...)`: is a run that was killed and started again the run that was never stopped?

What a kill would leave are copies of the folder, made when all ranks enter a step: after a save within an epoch, and
after one at an epoch's edge. From them other runs go on. At the entry of each step a run notes which rows it was given
and what it is made of: weights, momentum, the generator of dropout. So the first thing that did not come back has a
name, before it has become other weights. The order of the rows is free, so each start is compared with its own run.

Read next: `cadence.py`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.compare import close
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from judges.checkpointing.files import file_events, fresh_folder, other_writer, read

ROWS = 4  # of a batch on one rank
EVERY, STEPS = 2, 9  # steps between two saves, and in all
KILLED = (4, 6)  # the steps that are in the newest file: one of them ends an epoch, be that of 3 batches or 4


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

    def __init__(self, rank: int, world_size: int, seed: int, batches: int, enters: Callable[[int], None]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 1))
        self.model = nn.parallel.DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.local_batch = ROWS
        self.dataset = Rows(world_size * ROWS * batches)
        torch.manual_seed(100 * seed + rank)  # each rank its own dropout
        self._enters = enters
        self._steps: list[dict[str, Any]] = []

    def train_on(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Take one step of SGD on a batch of this rank, with the other ranks."""
        self._enters(len(self._steps))
        momentum = (self.optimizer.state.get(p, {}).get("momentum_buffer") for p in self.model.parameters())
        made_of = {"weights": self.model.parameters(), "momentum": momentum, "generator": [torch.get_rng_state()]}
        hashes = {part: _hash(tensors) for part, tensors in made_of.items()}
        self._steps.append({"rows": x[:, 0].int().tolist(), **hashes})
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x[:, 1:]), y).backward()
        self.optimizer.step()


def _hash(tensors: Iterable[torch.Tensor | None]) -> str:
    return hashlib.sha1(b"".join(t.detach().numpy().tobytes() for t in tensors if t is not None)).hexdigest()


def cases(rng: Random, folder: Path) -> list[Round]:
    """A run at a stretch, one that is started again when all is done; one that is killed; one with a torn file.

    A case: its kind, a folder, a seed, how many batches an epoch has, and how many steps there are.
    """
    world_size, batches, seed = rng.choice((2, 3)), rng.choice((3, 4)), rng.randint(1, 40)

    def case(kind: str, steps: int = STEPS) -> tuple[str, tuple]:
        return kind, (kind, str(folder / kind), seed, batches, steps)

    return [Round(world_size, each) for each in ([case("straight"), case("done", 4)], [case("killed")], [case("torn")])]


def act(function: Callable, case: tuple, rank: int, world_size: int) -> Note:
    """Train at a stretch; and on from the files that a kill would have left."""
    kind, parent, seed, batches, steps = case
    parent = Path(parent)

    def alone(change: Callable[[], object]) -> None:
        """One rank changes files, when no rank uses them."""
        dist.barrier()
        if rank == 0:
            parent.mkdir(exist_ok=True)
            change()
        dist.barrier()

    def trained(folder: str, seed: int, *killed: int) -> dict[str, Any]:
        def enters(done: int) -> None:
            if done - 1 in killed:
                alone(lambda: shutil.copytree(parent / folder, parent / f"left{done - 1}"))

        alone(lambda: (parent / folder).mkdir(exist_ok=True))
        run = Run(rank, world_size, seed, batches, enters)
        with file_events(function, str(parent / folder / "any")) as events:
            function(rank, world_size, run, steps, EVERY, parent / folder)
        return {"steps": run._steps, "end": tasks.weights(run.model), "events": events, "read": run.dataset.read[:ROWS]}

    straight = trained("straight", seed, *(() if kind in ("straight", "done") else KILLED))
    if kind in ("straight", "done"):
        dist.barrier()  # where other ranks write, too, they have done so
        there = {path.name: read(path, lambda state: "") for path in sorted((parent / "straight").iterdir())}
        more = len(trained("straight", seed + 1)["steps"]) if kind == "done" else 0
        return Note(straight, files=there, more=more)
    if kind == "killed":
        return Note(straight=straight, starts={at: trained(f"left{at}", seed + 1) for at in KILLED})

    before, newest = parent / "left4", parent / "left6" / "step-000006.pt"
    if missing := [path.name for path in (before / "step-000004.pt", newest) if not path.exists()]:
        return Note(missing=missing)
    dist.barrier()  # else rank 0 may tear what another looks for

    def tear() -> None:
        shutil.copytree(before, parent / "empty")
        (parent / "empty" / newest.name).touch()
        os.truncate(newest, newest.stat().st_size // 2)

    alone(tear)
    return Note(straight=straight, starts={each: trained(each, seed + 2) for each in ("left4", "left6", "empty")})


# --- What is looked at -----------------------------------------------------------------------------


def straight(seen: Seen) -> list[str]:
    """All steps are trained, on all rows."""
    counts, batches = sorted({len(note["steps"]) for note in seen.everyone}), seen.case[3]
    epochs = [[step["rows"] for n in seen.everyone for step in n["steps"][e : e + batches]] for e in (0, batches)]
    once = all(sorted(sum(rows, [])) == list(range(seen.world_size * ROWS * batches)) for rows in epochs)
    alike = "the same order in each epoch" if epochs[0] == epochs[1] else "another order in each epoch"
    return [f"steps: {counts}", "each row once in an epoch" if once else "some rows twice, or never", alike]


def files(seen: Seen) -> dict[str, Any]:
    """Rank 0 has written a file at each save, which can be read."""
    written = "another rank writes" if other_writer(seen) else "rank 0 writes"
    return {"files:": list(seen["files"]), "writers:": written, "troubles:": sorted(set(seen["files"].values()) - {""})}


def went_on(seen: Seen, at: int, start: dict[str, Any]) -> dict[str, Any]:
    """The rows are those of the run at a stretch, from the step on."""
    right, found = ([step["rows"] for step in note["steps"]] for note in (seen["straight"], start))
    alike = found == right[at:]
    first = at if alike else right.index(found[0]) if found and found[0] in right else None
    return {
        "goes on with the rows of step": "none" if first is None else first + 1,
        "steps:": len(found),
        "rows:": "those of the run at a stretch" if alike else "others",
    }


def position(seen: Seen) -> dict[str, Any]:
    """No row comes twice, and none is left out; none is read and thrown away."""
    if seen.case[0] == "done":
        return {"steps more, when all are done:": seen["more"]}
    found = {}
    for at, start in seen["starts"].items():
        first = start["steps"][0]["rows"] if start["steps"] else []
        rows_read = "its rows" if sorted(start["read"]) == sorted(first) else "others"
        found[f"killed in step {at + 2}:"] = {**went_on(seen, at, start), "read first:": rows_read}
    return found


def bits(seen: Seen) -> dict[str, Any]:
    """What the first step after the kill begins with, and the end."""
    return {f"killed in step {at + 2}:": _bits(seen, at, start) for at, start in seen["starts"].items()}


def _bits(seen: Seen, at: int, start: dict[str, Any]) -> dict[str, Any]:
    right = seen["straight"]["steps"]
    if not start["steps"] or len(right) <= at:
        return {"first step:": "none"}
    found, others = start["steps"][0], [note["straight"]["steps"][at] for note in seen.everyone]
    names = {True: "those of the run at a stretch"}
    begins = {
        part: names.get(found[part] == right[at][part], "others") for part in ("weights", "momentum", "generator")
    }
    if found["weights"] == right[at - 1]["weights"]:
        begins["weights"] = "those of one step before"
    if begins["generator"] == "others" and found["generator"] in [other["generator"] for other in others]:
        begins["generator"] = "that of another rank"
    return {**begins, "end": names.get(same_end(seen, start["end"], seen["straight"]["end"]), "others")}


def same_end(seen: Seen, found: list, right: list) -> bool:
    """Compare bits; with three ranks up to rounding, since a sum of three depends on the order of its additions."""
    return found == right if seen.world_size == 2 else close(found, right, 1e-5)


def torn(seen: Seen) -> dict[str, Any]:
    """A torn file counts as none, and so does an empty one."""
    if seen["missing"]:
        return {"missing": seen["missing"]}
    whole, *others = seen["starts"].values()
    alike = all(n["steps"][:1] == whole["steps"][:1] and same_end(seen, n["end"], whole["end"]) for n in others)
    on = went_on(seen, KILLED[0], seen["starts"]["left6"])
    return {**on, "trains": "as if it were not there" if alike else "with something of the torn file"}


MISTAKES = """
always from the beginning | position bits torn | the run begins again; look for the newest file in the folder first
    folder.glob("step-*.pt") => []
the epoch repeated | position bits torn
| the epoch is repeated from its start, so rows come twice; skip those that are done
    list(sampler)[done * run.local_batch :] => list(sampler)
the rest of the epoch left out | position bits torn
| the rest of the epoch is left out; it has batches that nobody has seen
    while step < steps: => step = -(-step // steps_per_epoch) * steps_per_epoch
    while step < steps:
read and thrown away | position | rows that were done are read once more; leave their indices out, not their batches
    list(sampler)[done * run.local_batch :] => list(sampler)
    for x, y in DataLoader( => for number, (x, y) in enumerate(DataLoader(
    generator=torch.Generator()): => generator=torch.Generator())):
        if number < done:
            continue
batches for rows | position bits torn | rows are skipped by another count than they were trained: done * run.local_batch
    [done * run.local_batch :] => [done:]
counted from the restart | position bits torn | count on from the step in the file, to `steps` and not `steps` more
    step = state["step"] => step = state["step"]
    steps += step
no set_epoch | straight | sampler.set_epoch(epoch)
    sampler.set_epoch(epoch) => pass
all rows on all ranks | straight | deal the rows out as DistributedSampler does, in batches of run.local_batch
    DistributedSampler(run.dataset, world_size, rank) => DistributedSampler(run.dataset, world_size, 0)
every rank writes | files | gather on rank 0 what differs between the ranks, and let rank 0 write
    if rank == 0: => if True:
old files deleted | files torn | keep all files: the newest may be torn
    if rank == 0: => if rank == 0:
        [old.unlink() for old in folder.iterdir()]
the last step not saved | files position
| save after every `every` steps, counted from the run's beginning, the last one, too
    % every == 0: => % every == 0 and step + 2 < steps:
the optimizer forgotten | bits | save and load run.optimizer.state_dict()
    run.optimizer.load_state_dict(state["optimizer"]) => pass
the generators forgotten | bits | save torch.get_rng_state() of each rank and put it back
    torch.set_rng_state(state["generators"][rank]) => pass
rank 0's generator | bits
| each rank draws its own dropout: save torch.get_rng_state() of all ranks, give each its own back
    ["generators"][rank] => ["generators"][0]
the DataLoader draws | bits
| a DataLoader without a generator of its own draws from torch's whenever an epoch begins: generator=torch.Generator()
    , generator=torch.Generator()) => )
no weights | bits | load the model's state_dict, run.model.module, and save it after the step
    run.model.module.load_state_dict(state["model"]) => pass
saved before the step | position bits torn
| these are the weights from before that step: save after run.train_on, not before it
    run.train_on(x, y) => pass
    if step == steps: => run.train_on(x, y)
    if step == steps:
the newest or none | torn | one torn file is no reason to begin again: take the one before
    continue => break
then `steps` more | torn | the torn file counts as none: go on to `steps`, in the right epochs
    continue => torn = True
    continue
    step = 0 => step, torn = 0, False
    step = state["step"] => step = state["step"]
    steps += torn * step
a torn file is an error | torn | catch what torch.load raises for a torn file, and take the one before | tests
    except Exception => except FileNotFoundError
a RuntimeError alone | torn | a RuntimeError, an EOFError or an OSError | tests
    except Exception => except RuntimeError
gathered on rank 0 alone | all | a collective that not every rank calls | hangs
    dist.all_gather_object( => rank or dist.all_gather_object(
the generator comes back after the loader has begun | bits
| what a step begins with is saved after the one before | tests
    def train_resumable(rank, world_size, run, steps, every, folder):
        step, rng = 0, None
        for path in sorted(folder.glob("step-*.pt"), reverse=True):
            try:
                saved = torch.load(path, weights_only=True)
            except Exception:
                continue
            run.model.load_state_dict(saved["model"])
            run.optimizer.load_state_dict(saved["optimizer"])
            step, rng = saved["step"], saved["rng"][rank]
            break
        sampler = DistributedSampler(run.dataset, world_size, rank)
        per_epoch = len(sampler) // run.local_batch
        while step < steps:
            epoch, done = divmod(step, per_epoch)
            sampler.set_epoch(epoch)
            rest = list(sampler)[done * run.local_batch :]
            batches = iter(DataLoader(run.dataset, run.local_batch, sampler=rest))
            if rng is not None:  # the loader has drawn its number
                torch.set_rng_state(rng)
                rng = None
            for x, y in batches:
                run.train_on(x, y)
                step += 1
                if step % every == 0:
                    states = [torch.empty_like(torch.get_rng_state()) for _ in range(world_size)]
                    dist.all_gather(states, torch.get_rng_state())
                    if rank == 0:
                        state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
                        torch.save({**state, "rng": states, "step": step}, folder / f"step-{step:06d}.pt")
                if step == steps:
                    return
"""

RIGHT = """
no DataLoader, an order of its own, rank 0 reads
    def batches_of(rank, world_size, run, epoch):
        order = torch.randperm(len(run.dataset), generator=torch.Generator().manual_seed(99 + epoch))
        return order.view(-1, world_size, run.local_batch)[:, rank]

    def newest(folder):
        for path in reversed(sorted(folder.glob("*.pt"))):
            try:
                return torch.load(path, weights_only=True)
            except (RuntimeError, EOFError, OSError):
                print("torn", path.name)

    def train_resumable(rank, world_size, run, steps, every, folder):
        box = [newest(folder) if rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        step = 0
        if box[0] is not None:
            model, optimizer, generators, step = box[0]
            run.model.load_state_dict(model)
            run.optimizer.load_state_dict(optimizer)
            torch.set_rng_state(generators[rank])
        for step in range(step, steps):
            count = len(run.dataset) // world_size // run.local_batch
            rows = batches_of(rank, world_size, run, step // count)[step % count]
            x, y = zip(*[run.dataset[row] for row in rows.tolist()])
            run.train_on(torch.stack(x), torch.stack(y))
            if (step + 1) % every == 0:
                mine = torch.get_rng_state()
                all_of_them = [torch.empty_like(mine) for _ in range(world_size)]
                dist.all_gather(all_of_them, mine)
                if rank == 0:
                    path = folder / f"step-{step + 1:06d}.pt"
                    parts = [run.model.state_dict(), run.optimizer.state_dict(), all_of_them, step + 1]
                    torch.save(parts, path.with_suffix(".new"))
                    path.with_suffix(".new").replace(path)
                dist.barrier()
"""

RESUME = exercise(
    *("15.2", "Killed within an epoch", "train_resumable", 35),
    cases=cases,
    act=act,
    within=fresh_folder,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "straight": ("a run that nobody kills", 1, "straight", straight,
                     "begin at step 0 if the folder is empty, and go on from epoch to epoch until the step is reached"),
        "files": ("one file at each save, from rank 0", 1, "straight done", files,
                  "save after every `every` steps what torch.load(weights_only=True) reads, and keep all files"),
        "position": ("killed and started again: no row twice, none left out", 2, "killed done", position,
                     "count on from the step in the newest file, and skip the rows of the epoch that are done"),
        "bits": ("the same bits as without the kill", 2, "killed", bits,
                 "what a step begins with is saved after the one before, and loaded on each rank, also between epochs"),
        "torn": ("the newest file is torn: on from the one before", 1, "torn", torn,
                 "a file that cannot be read counts as none, and no part of it is loaded"),
    },
    refused=(
        *("ddp_course.checkpoint.folder.Checkpointer", "ddp_course.checkpoint.state.capture_state"),
        "ddp_course.checkpoint.state.restore_state",
    ),
    hints={
        "Weights only load failed|WeightsUnpickler|Unsupported global": "the file holds objects; save state_dict()s, "
        "tensors and numbers",
        r"PytorchStreamReader|EOFError|Ran out of input|central directory|OSError": "catch what torch.load raises for "
        "a torn file, and take the one before. By where it was cut, that is a RuntimeError, an EOFError or an OSError",
        r"(?s)killed by SIGSEGV.*set_rng_state": "torch.set_rng_state reads memory from its beginning, also when it is "
        "given a row of a larger tensor: give it a clone",
        r"Missing key|Unexpected key": "save and load run.model.module.state_dict(), the bare model's names",
        "absent|disagree|cut-off": "a collective that not every rank calls, as within "
        "`if rank == 0`: every rank must take part in a gather, and train as many steps",
        "limit": "a loop that never reaches `steps`, or a collective that not every rank calls",
        r"No such file|FileNotFoundError": "on the first start the folder is empty; then begin at step 0",
    },
)  # fmt: skip
