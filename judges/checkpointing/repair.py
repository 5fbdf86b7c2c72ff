"""10.4 `train_repaired(...)`: which of five faults of a training script are gone?

Each fault is found by what the script does, whatever the others do: the model notes the rows of each step, and the
judge repeats the steps on these rows, in one process.

Read next: `grading/checking.py`, what becomes of all this.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from ddp_course.grading.compare import close, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from judges.checkpointing.files import FileEvents, fresh_folder

BATCH, STEPS, EPOCHS, RATE = 4, 3, 3, 0.1  # rows of a batch, steps of an epoch
SLOW_S = 0.05

Note = dict[str, Any]


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


def rows_of(seed: int, n_rows: int) -> TensorDataset:
    """Make rows that are numbered in their first column."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n_rows, 3, generator=generator)
    x[:, 0] = torch.arange(n_rows) / n_rows
    return TensorDataset(x, 3 * torch.randn(n_rows, 1, generator=generator))


def repair_driver(rank: int, world_size: int, function: Callable, path: str, seed: int, n_held_out: int) -> Note:
    """Run the script; note its rows, its weights, its loss and what it did to files."""
    n_rows = world_size * BATCH * STEPS
    model = Noted(n_rows, seed)
    files = FileEvents(os.path.dirname(path), SLOW_S if rank == 0 else 0.0)
    data = rows_of(seed, n_rows), rows_of(seed + 1, n_held_out)
    loss = function(rank, world_size, model, *data, EPOCHS, Path(path))
    return {
        "steps": model.steps,
        "weights": [p.tolist() for p in model.parameters()],
        "loss": plain(loss),
        "writes": sum(kind == "write" for kind, *_ in files.events),
        "file": _content(path),
    }


def _content(path: str) -> Any:
    try:
        return {name: value.tolist() for name, value in torch.load(path, weights_only=True).items()}
    except Exception as error:
        return f"a file that cannot be read ({type(error).__name__})" if os.path.exists(path) else "no file"


def repair_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Run the script once; the rows of the last ranks' held-out shards are fewer."""
    world_size, seed = rng.choice((2, 3)), rng.randint(1, 1000)
    n_held_out = world_size * rng.randint(1, 2) + 1
    with fresh_folder() as folder:
        notes = answer.run(repair_driver, world_size, str(folder / "model.pt"), seed, n_held_out, init=True)
    yield "shares", _shares_fault(notes)
    yield "order", _order_fault(notes)
    yield "gradients", _gradients_fault(notes, seed)
    yield "loss", _loss_fault(notes, rows_of(seed + 1, n_held_out))
    yield "file", _file_fault(notes)


def _epochs(note: Note) -> list[list[int]]:
    """The rows of each epoch, in their order."""
    rows = [row for step in note["steps"] for row in step]
    return [rows[i : i + BATCH * STEPS] for i in range(0, len(rows), BATCH * STEPS)]


def _count_fault(notes: list[Note]) -> Fault | None:
    for rank, note in enumerate(notes):
        counts = [len(step) for step in note["steps"]]
        if counts != [BATCH] * (STEPS * EPOCHS):
            expected = f"{EPOCHS} epochs of {STEPS} steps, each on {BATCH} rows"
            cause = "the script's steps, batch size and epochs were right; leave them"
            return Fault(expected, f"{len(counts)} steps, on {short(counts)} rows", rank, cause)
    return None


def _shares_fault(notes: list[Note]) -> Fault | None:
    if fault := _count_fault(notes):
        return fault
    n_rows = len(notes) * BATCH * STEPS
    for epoch, parts in enumerate(zip(*map(_epochs, notes), strict=True)):
        rows = [row for part in parts for row in part]
        if sorted(rows) != list(range(n_rows)):
            missing = n_rows - len(set(rows))
            found = f"{missing} rows of {n_rows} come to no rank in epoch {epoch}, others twice"
            cause = "each rank cuts its part out of another shuffle; the sampler's seed must be the same on all ranks"
            return Fault("each row once in an epoch, on one rank", found, cause=cause)
    return None


def _order_fault(notes: list[Note]) -> Fault | None:
    if fault := _count_fault(notes):
        return fault
    for rank, note in enumerate(notes):
        first, *rest = _epochs(note)
        if any(epoch == first for epoch in rest):
            sorted_ = first == sorted(first)
            cause = "nothing is shuffled" if sorted_ else "the sampler knows its epoch only if told: set_epoch(epoch)"
            return Fault("another order in each epoch", f"the same {len(first)} rows in the same order", rank, cause)
    return None


def _gradients_fault(notes: list[Note], seed: int) -> Fault | None:
    if fault := _count_fault(notes):
        return fault
    steps = [note["steps"] for note in notes]
    right, found = _trained(steps, seed, RATE), notes[0]["weights"]
    apart = next((rank for rank, note in enumerate(notes) if not close(note["weights"], found, 1e-5)), None)
    if apart is None and close(found, right, 1e-4):
        return None
    if apart is not None:
        cause = "the ranks drift apart: this forward does not pass through DDP, which then does not average"
        return Fault("the same weights on all ranks, after every step", "others than on rank 0", apart, cause)
    if close(found, _trained(steps, seed, RATE * len(notes)), 1e-4):
        cause = "gradients are summed over the ranks, not averaged; DDP averages by itself"
    else:
        cause = "all ranks have the same weights, but wrong ones; the loss, the rate and the steps were right"
    return Fault(f"weights {short(right[0][0])}: each step with the mean gradient", short(found[0][0]), cause=cause)


def _trained(steps: list[list[list[int]]], seed: int, rate: float) -> list:
    """Repeat the steps in one process, on the rows that the ranks saw."""
    n_rows = len(steps) * BATCH * STEPS
    model, (x, y) = Noted(n_rows, seed).double(), rows_of(seed, n_rows).tensors
    for parts in zip(*steps, strict=True):
        rows = [row for part in parts for row in part]
        model.zero_grad()
        F.mse_loss(model.linear(x[rows].double()), y[rows].double()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
    return [p.tolist() for p in model.parameters()]


def _loss_fault(notes: list[Note], held_out: TensorDataset) -> Fault | None:
    sums, whole = zip(*(_squares(note, held_out, rank, len(notes)) for rank, note in enumerate(notes)), strict=True)
    counts = [len(range(rank, len(held_out), len(notes))) for rank in range(len(notes))]
    right = sum(sums) / len(held_out)
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    for rank, note in enumerate(notes):
        found = note["loss"]
        if close(found, right, 1e-4) or close(found, whole[rank] / len(held_out), 1e-4):
            continue
        if close(found, sum(means) / len(means), 1e-4):
            shares = " and ".join(map(str, sorted(set(counts), reverse=True)))
            cause = f"this is the mean of the ranks' means, but they have {shares} rows; add up sums and counts"
        elif close(found, means[rank], 1e-4) or close(found, means[0], 1e-4):
            cause = "this is the mean of one rank's rows; add up the sums and the counts of all ranks"
        elif close(found, sum(sums), 1e-4) or close(found, sum(means), 1e-4):
            cause = "this is a sum over the ranks; divide by the number of all rows"
        else:
            cause = "sum of all squared errors, over the number of all rows; on every rank"
        return Fault(f"{right:.5g}, the mean over all {len(held_out)} held-out rows", short(found), rank, cause)
    return None


def _squares(note: Note, held_out: TensorDataset, rank: int, world_size: int) -> tuple[float, float]:
    """The sum of squared errors of this rank's model, over its own rows and over all."""
    weight, bias = (torch.tensor(value, dtype=torch.float64) for value in note["weights"])
    x, y = (tensor.double() for tensor in held_out.tensors)
    errors = (x @ weight.T + bias - y).square().flatten()
    return errors[rank::world_size].sum().item(), errors.sum().item()


def _file_fault(notes: list[Note]) -> Fault | None:
    expected = "the bare model's weights, written by rank 0 alone, there when the function returns"
    for rank, note in enumerate(notes):
        if rank and note["writes"]:
            cause = "all ranks write to one path at the same time; if rank == 0"
            return Fault(expected, "this rank writes too", rank, cause)
        if isinstance(note["file"], str):
            return Fault(expected, note["file"], rank, "rank 0 writes, then all ranks meet: dist.barrier()")
        if any(name.startswith("module.") for name in note["file"]):
            cause = "the names must be the bare model's, as they were: replica.module.state_dict()"
            return Fault(expected, f"a file with {next(iter(note['file']))}", rank, cause)
        if list(note["file"].values()) != notes[0]["weights"]:
            return Fault(expected, "other weights", rank, "save after the last step, rank 0's weights")
    return None


REPAIR = Exercise(
    "10.4",
    "Repair a training script (stretch)",
    "train_repaired",
    30,
    (
        Check("shares", "in each epoch, each row is on one rank once", 1),
        Check("order", "each epoch has an order of its own", 1),
        Check("gradients", "all ranks step with the mean gradient", 2),
        Check("loss", "the held-out loss is that of all rows", 1),
        Check("file", "rank 0 alone writes the weights", 1),
    ),
    repair_judge,
    hints=(
        (
            r"never entered|no result after|lost the connection",
            "a collective that not every rank calls; a barrier within `if rank == 0`, perhaps",
        ),
        (r"has no attribute 'set_epoch'", "set_epoch is the sampler's: sampler.set_epoch(epoch)"),
    ),
)
