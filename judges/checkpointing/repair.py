"""10.4 `train_repaired(...)`: which of five faults of a training script are gone?

Each fault is found by what the script does, whatever the others do: the model notes the rows of each step, and the
judge repeats the steps on these rows, in one process.

Read next: `grading/checking.py`, what becomes of all this.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_course.grading import tasks
from ddp_course.grading.compare import close, short
from ddp_course.grading.exercise import Fault
from ddp_course.grading.expect import all_of, equals, exercise, first_mistake, once
from ddp_course.grading.isolated import plain
from ddp_course.grading.play import Note, Round, Seen
from judges.checkpointing.files import file_events, fresh_folder, other_writer, read

BATCH, STEPS, EPOCHS, RATE = 4, 3, 3, 0.1  # rows of a batch, steps of an epoch
SLOW_S = 0.05


class Noted(nn.Module):
    """A linear model that notes which rows it is trained on: the first column is the row's number."""

    def __init__(self, n_rows: int, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, 1)
        self.n_rows, self.steps = n_rows, []

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.steps.append([round(number * self.n_rows) for number in x[:, 0].tolist()])
        return self.linear(x)


@dataclass(frozen=True)
class Case:
    """Where the script writes, its seed, and how many rows it is given."""

    path: str
    seed: int
    n_rows: int
    n_held_out: int

    def rows(self, held_out: bool = False) -> TensorDataset:
        """Return rows that are numbered in their first column."""
        n_rows, generator = self.n_held_out if held_out else self.n_rows, torch.Generator()
        x = torch.rand(n_rows, 3, generator=generator.manual_seed(self.seed + held_out))
        x[:, 0] = torch.arange(n_rows) / n_rows
        return TensorDataset(x, 3 * torch.randn(n_rows, 1, generator=generator))


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Run the script; note its rows, its weights, its loss and what it did to files."""
    model = Noted(case.n_rows, case.seed)
    with file_events(function, case.path, 0 if rank else SLOW_S) as events:
        loss = function(rank, world_size, model, case.rows(), case.rows(held_out=True), EPOCHS, Path(case.path))
    file = read(case.path, lambda state: {name: value.flatten().tolist() for name, value in state.items()})
    return Note(steps=model.steps, weights=tasks.weights(model), loss=plain(loss), events=events, file=file)


def rounds(rng: Random, folder: Path) -> list[Round]:
    """Run the script once; the rows of the last ranks' held-out shards are fewer."""
    world_size, seed = rng.choice((2, 3)), rng.randint(1, 1000)
    held_out = world_size * rng.randint(1, 2) + 1
    return [Round(world_size, [("run", Case(str(folder / "model.pt"), seed, world_size * BATCH * STEPS, held_out))])]


def epochs(seen: Seen, rank: int) -> list[list[int]]:
    """Return a rank's rows of each epoch, in their order."""
    rows = sum(seen.of(rank)["steps"], [])
    return [rows[i : i + BATCH * STEPS] for i in range(0, len(rows), BATCH * STEPS)]


def counted(seen: Seen) -> Fault | None:
    """Each rank takes the steps that it should."""
    counts = [[len(step) for step in note["steps"]] for note in seen.everyone]
    rank = next((rank for rank, found in enumerate(counts) if found != [BATCH] * (STEPS * EPOCHS)), None)
    return first_mistake(f"{EPOCHS} epochs of {STEPS} steps, each on {BATCH} rows", {
        "the script's steps, batch size and epochs were right; leave them":
            rank is not None and f"{len(counts[rank])} steps, on {short(counts[rank])} rows",
    }, rank)  # fmt: skip


def shares(seen: Seen) -> Fault | None:
    """In each epoch, the ranks have all rows."""
    by_epoch = zip(*(epochs(seen, rank) for rank in range(seen.world_size)), strict=True)
    missing = [seen.case.n_rows - len(set().union(*parts)) for parts in by_epoch]
    epoch = next((epoch for epoch, count in enumerate(missing) if count), None)
    return first_mistake("each row once in an epoch, on one rank", {
        "each rank cuts its part out of another shuffle; the sampler's seed must be the same on all ranks":
            epoch is not None and f"{missing[epoch]} rows come to no rank in epoch {epoch}, others twice",
    })  # fmt: skip


def order(seen: Seen) -> Fault | None:
    """No later epoch is as the first one."""
    first, *rest = epochs(seen, seen.rank)
    found = first in rest and f"the same {len(first)} rows in the same order"
    return first_mistake("another order in each epoch", {
        "nothing is shuffled": first == sorted(first) and found,
        "the sampler knows its epoch only if told: set_epoch(epoch)": found,
    }, seen.rank)  # fmt: skip


def apart(seen: Seen) -> Fault | None:
    """All ranks have the weights of rank 0."""
    far = [rank for rank, n in enumerate(seen.everyone) if not close(n["weights"], seen["weights"], 1e-5)]
    cause = "the ranks drift apart: this forward does not pass through DDP, which then does not average"
    found = far and f"rank {far[0]} has others than rank {seen.rank}"
    return first_mistake("the same weights on all ranks, after every step", {cause: found})


def one_process(seen: Seen, times: float = 1) -> list[float]:
    """Repeat the steps on the rows that the ranks saw; `times`: a factor too much in the gradients."""
    model, (x, y) = Noted(seen.case.n_rows, seen.case.seed).double(), seen.case.rows().tensors
    for parts in zip(*(note["steps"] for note in seen.everyone), strict=True):
        rows = sum(parts, [])
        given = x[rows].double(), y[rows].double()
        tasks.descend(model, times * tasks.gradient(model.linear, given), RATE)
    return tasks.weights(model)


averaged = equals(
    "with the mean gradient in each step, the weights",
    one_process,
    lambda s: [("gradients are summed over the ranks; DDP averages them by itself", one_process(s, s.world_size))],
    "all ranks have the same weights, but wrong ones; the loss, the rate and the steps were right",
    of="weights",
    tolerance=1e-4,
)


def loss(seen: Seen) -> Fault | None:
    """The loss is of each rank's model on its own rows, or of this rank's on all rows."""
    (x, y), n, errors = seen.case.rows(held_out=True).tensors, seen.case.n_held_out, []
    for note in seen.everyone:
        weights = torch.tensor(note["weights"], dtype=torch.float64)
        errors.append((x.double() @ weights[:3] + weights[3] - y[:, 0].double()).square())
    own = [part[rank :: seen.world_size] for rank, part in enumerate(errors)]
    total, means = sum(part.sum().item() for part in own), [part.mean().item() for part in own]
    rows = " and ".join(map(str, sorted({len(part) for part in own}, reverse=True)))
    alone = "this is the mean of one rank's rows; add up the sums and the counts of all ranks"
    added = "this is a sum over the ranks; divide by the number of all rows"
    ways = [
        *(("", total / n), ("", errors[seen.rank].mean().item())),
        (f"this is the mean of the ranks' means, but they have {rows} rows; add up sums and counts", mean(means)),
        *((alone, means[seen.rank]), (alone, means[0]), (added, total), (added, sum(means))),
        ("sum of all squared errors, over the number of all rows; on every rank", seen["loss"]),
    ]
    cause = next((cause for cause, value in ways if close(seen["loss"], value, 1e-4)), ways[-1][0])
    expected = f"{total / n:.5g}, the mean over all {n} held-out rows"
    return first_mistake(expected, {cause: cause and short(seen["loss"])}, seen.rank)


def file(seen: Seen) -> Fault | None:
    """The bare model's weights are there when a rank goes on."""
    file, why = (seen["file"], "") if isinstance(seen["file"], dict) else ({}, seen["file"])
    wrapped = next((name for name in file if name.startswith("module.")), "")
    return first_mistake("the bare model's weights, written by rank 0 alone, there when the function returns", {
        "all ranks write to one path at the same time; if rank == 0": other_writer(seen),
        "rank 0 writes, then all ranks meet: dist.barrier()": why,
        "the names must be the bare model's, as they were: replica.module.state_dict()":
            wrapped and f"a file with {wrapped}",
        "save after the last step, rank 0's weights":
            sum(file.values(), []) != seen.of(0)["weights"] and "other weights",
    }, seen.rank)  # fmt: skip


REPAIR = exercise(
    "10.4",
    "Repair a training script (stretch)",
    "train_repaired",
    30,
    act=act,
    rounds=rounds,
    within=fresh_folder,
    checks={
        "shares": ("in each epoch, each row is on one rank once", 1, once(all_of(counted, shares)), "run"),
        "order": ("each epoch has an order of its own", 1, all_of(counted, order), "run"),
        "gradients": ("all ranks step with the mean gradient", 2, once(all_of(counted, apart, averaged)), "run"),
        "loss": ("the held-out loss is that of all rows", 1, loss, "run"),
        "file": ("rank 0 alone writes the weights", 1, file, "run"),
    },
    hints={
        r"never entered|no result after|lost the connection": "a collective that not every rank calls; a barrier "
        "within `if rank == 0`, perhaps",
        r"has no attribute 'set_epoch'": "set_epoch is the sampler's: sampler.set_epoch(epoch)",
    },
)
