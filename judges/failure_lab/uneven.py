"""12.3 `train_uneven(...)`: with unequal numbers of batches, is every row trained on once, and nothing hangs?

The judge takes the same steps in one process: step t on the batches number t of the ranks that have one.

Read next: `records.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ddp_course.grading.compare import close, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

BATCH, RATE = 3, 0.1

Note = dict[str, Any]
Batch = tuple[torch.Tensor, torch.Tensor]


class Noted(nn.Module):
    """A linear model that notes which rows it is trained on: the last column is the row's number."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, 1)
        self.rows: list[int] = []

    def forward(self, x):
        if torch.is_grad_enabled():
            self.rows += [round(number) for number in x[:, 3].tolist()]
        return self.linear(x[:, :3])


@dataclass(frozen=True)
class Task:
    """How many batches each rank has, and from which seed they are."""

    seed: int
    counts: tuple[int, ...]

    def batches(self) -> list[list[Batch]]:
        """Make the batches of each rank; all rows are numbered."""
        generator = torch.Generator().manual_seed(self.seed)
        made, number = [], 0
        for count in self.counts:
            made.append([])
            for _ in range(count):
                x = torch.randn(BATCH, 4, generator=generator)
                x[:, 3] = torch.arange(number, number + BATCH)
                number += BATCH
                made[-1].append((x, 3 * torch.randn(BATCH, 1, generator=generator)))
        return made


def uneven_driver(rank: int, world_size: int, function: Callable, task: Task) -> Note:
    """Run the answer on this rank's batches, given one by one; note its weights, rows and result."""
    model = Noted(task.seed)
    mine = task.batches()[rank]
    result = function(rank, world_size, model, iter(mine), RATE)  # no len(): a stream does not know its end
    return {"result": plain(result), "rows": model.rows, "weights": [p.detach().flatten().tolist() for p in _of(model)]}


def _of(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def uneven_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Train with unequal numbers of batches, then with a rank that has none."""
    seed = rng.randint(1, 1000)
    first, second = rng.sample((2, 3, 4), 2)
    uneven = Task(seed, tuple(rng.sample(range(1, 6), first)))
    empty = [*rng.sample(range(2, 5), second - 1), 0]
    rng.shuffle(empty)
    notes = answer.run(uneven_driver, len(uneven.counts), uneven, init=True)
    yield "rows", _rows_fault(uneven, notes)
    yield "whole", _weights_fault(uneven, notes)
    yield "count", _count_fault(uneven, notes)
    nothing = Task(seed + 1, tuple(empty))
    notes = answer.run(uneven_driver, len(empty), nothing, init=True)
    yield "none", _rows_fault(nothing, notes) or _weights_fault(nothing, notes) or _count_fault(nothing, notes)


def trained(task: Task, steps: int, divisor: Callable[[int], float], keep: bool = False) -> list[list[float]]:
    """Take the steps in one process; `divisor(ranks with a batch)` is what the sum of their gradients is divided by.

    With `keep`, the mean gradients of all steps before are still in each step's.
    """
    model = Noted(task.seed).double()
    batches = task.batches()
    kept = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for step in range(steps):
        model.zero_grad()
        present = [of_rank[step] for of_rank in batches if step < len(of_rank)]
        for x, y in present:
            F.mse_loss(model(x.double()), y.double()).backward()
        with torch.no_grad():
            for parameter, before in zip(model.parameters(), kept, strict=True):
                mean = parameter.grad / divisor(len(present)) + before
                parameter -= RATE * mean
                if keep:
                    before.copy_(mean)
    return [p.detach().flatten().tolist() for p in model.parameters()]


def _rows_fault(task: Task, notes: list[Note]) -> Fault | None:
    said = f"each of {BATCH * sum(task.counts)} rows trained on once; the ranks have {list(task.counts)} batches"
    counts = Counter(row for note in notes for row in note["rows"])
    for rank, (note, n_batches) in enumerate(zip(notes, task.counts, strict=True)):
        done = len(note["rows"]) // BATCH
        if done < n_batches:
            cause = "rows are lost: the ranks stop when the first of them has no more batches"
            return Fault(said, f"{done} of {n_batches} batches", rank, cause)
        if done > n_batches:
            cause = "batches are used again to fill up; a rank without a batch takes part, but with nothing"
            return Fault(said, f"{done} batches, and the rank has {n_batches}", rank, cause)
    if counts and max(counts.values()) > 1:
        row, times = counts.most_common(1)[0]
        return Fault(said, f"row {row} {times} times", cause="train on each batch once")
    return None


def _weights_fault(task: Task, notes: list[Note]) -> Fault | None:
    found, world_size, steps = notes[0]["weights"], len(notes), max(task.counts)
    right = trained(task, steps, lambda ranks: ranks)
    said = f"weights {short(right[0])}: each step with the mean over the rows there are"
    for rank, note in enumerate(notes):
        if not close(note["weights"], found, 1e-5):
            cause = "a rank without a batch must take the step, too, with the others' gradient"
            return Fault("the same weights on all ranks", "others than on rank 0", rank, cause)
    if close(found, right, 1e-4):
        return None
    wrong = {
        "gradients are divided by the world size in each step; divide by the number of ranks that had a batch "
        "(Join: divide_by_initial_world_size=False)": trained(task, steps, lambda ranks: world_size),
        "gradients are summed over the ranks; divide by the number of ranks that had a batch": trained(
            task, steps, lambda ranks: 1
        ),
        "the gradients of the steps before are still in .grad; call zero_grad() before each backward": trained(
            task, steps, lambda ranks: ranks, keep=True
        ),
        "the steps end when the first rank has no more batches": trained(task, min(task.counts), lambda ranks: ranks),
    }
    default = "a wrong mean: add up the gradients of all ranks, and divide by how many had a batch in this "
    default += "step; or the gradients of the step before are still in .grad"
    cause = next((cause for cause, weights in wrong.items() if close(found, weights, 1e-4)), default)
    return Fault(said, short(found[0]), cause=cause)


def _count_fault(task: Task, notes: list[Note]) -> Fault | None:
    total = BATCH * sum(task.counts)
    for rank, note in enumerate(notes):
        found = note["result"]
        if isinstance(found, int | float) and not isinstance(found, bool) and found == total:
            continue
        if found == BATCH * task.counts[rank]:
            cause = "these are the rank's own rows; add them up over the ranks"
        elif found == sum(task.counts):
            cause = "these are batches; count rows"
        else:
            cause = "the number of rows trained on by all ranks together, the same on every rank"
        return Fault(f"{total} rows", short(found), rank, cause)
    return None


UNEVEN = Exercise(
    "12.3",
    "Uneven inputs",
    "train_uneven",
    25,
    (
        Check("rows", "each row is trained on once", 1),
        Check("whole", "the weights are those of one process", 2),
        Check("count", "every rank returns the number of all rows", 1),
        Check("none", "all of this with a rank that has no batch", 1),
    ),
    uneven_judge,
    hints=(
        (r"has no len|object of type 'list_iterator'", "`batches` is an iterator: take them one by one, next(...)"),
        (r"StopIteration", "next(batches, None) gives None at the end"),
        (
            r"with Join\(",
            "within Join, a rank that is done answers only DDP's collectives: move your own after the `with`; and all "
            "batches are to be used up within it",
        ),
        (
            r"never entered|no result after|lost the connection|disagree about collective|different sizes",
            "a rank without a batch must take part in the collectives until no rank has one, and no longer; ask before "
            "each step who has one, or use Join",
        ),
    ),
)
