"""00.3 `parallel_step(rank, world_size, model, x, y, lr)`: do two such steps give what one process gives?

Compared in float64 with one process that sees all rows, after one step and after a second one on the same replica.
Read next: `judges/why_data_parallel/`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import torch
from torch import nn

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.compare import close
from ddp_course.grading.vocabulary.expect import all_of, equals, exercise, turned
from ddp_course.grading.vocabulary.play import Note, Round, Seen

COLUMNS = 5  # of inputs and targets
NOTHING_MOVED = "the weights have not changed: the step must be written into the model's own parameters, in place"


@dataclass(frozen=True)
class Case:
    """Two steps on so many rows of each rank."""

    seed: int
    rows: int
    lr: float

    def model(self) -> nn.Module:
        """Return the same small network on every rank."""
        return tasks.net(self.seed, COLUMNS, 4, COLUMNS)

    def batch(self, rank: int, step: int) -> tasks.Batch:
        """Return one rank's rows of one step: inputs and targets, each of shape (rows, COLUMNS)."""
        return tasks.batch(self.seed, rank, step, self.rows, COLUMNS)


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Take two steps with the function; note by how much the weights have changed after each."""
    model, start, changes = case.model(), tasks.weights(case.model()), []
    own = list(model.parameters())
    for step in range(2):
        function(rank, world_size, model, *case.batch(rank, step), case.lr)
        changes.append([after - before for after, before in zip(tasks.weights(model), start, strict=True)])
    replaced = any(before is not after for before, after in zip(own, model.parameters(), strict=True))
    return Note(first=changes[0], second=changes[1], replaced=replaced)


def rounds(rng: Random) -> list[Round]:
    """Three ranks, then another number, with two models in turn."""
    case = Case(rng.randrange(10**6), rng.randint(2, 5), rng.choice((0.01, 0.02)))
    return [Round(3, [("three", case)]), Round(rng.choice((2, 4)), [("more", case), ("more", replace(case, lr=0.05))])]


def one_process(seen: Seen, steps: int, times: float = 1) -> list[float]:
    """Return by how much the weights of one process with all rows have changed; the gradient times a factor."""
    model, start = seen.case.model(), tasks.weights(seen.case.model())
    for step in range(steps):
        shards = (seen.case.batch(rank, step) for rank in range(seen.world_size))
        whole = tuple(map(torch.cat, zip(*shards, strict=True)))
        tasks.descend(model, times * tasks.gradient(model, whole), seen.case.lr)
    return [after - before for after, before in zip(tasks.weights(model), start, strict=True)]


def together(seen: Seen) -> Fault | None:
    """The weights have changed, and are those of rank 0."""
    if seen["replaced"]:
        cause = "an optimizer, or DDP, holds the model's own parameters: change these, in place"
        return Fault("the model's own parameters, changed", "new ones in their place", seen.rank, cause)
    if not any(seen["second"]):
        return Fault("other weights after two steps", "those of the start", seen.rank, NOTHING_MOVED)
    if close(seen["second"], seen.of(0)["second"], 1e-10):  # an order of adding may cost a last bit
        return None
    cause = "the replicas drift apart: every rank must apply the same averaged gradient"
    return Fault("the same weights on all ranks after two steps", "other weights than rank 0's", seen.rank, cause)


def _mistakes(seen: Seen) -> dict[str, dict]:
    rows, w = seen.case.rows, seen.world_size
    factors = {
        NOTHING_MOVED: 0,
        "the step goes uphill: subtract the gradient": -1,
        "the gradients are summed over the ranks, not averaged: divide by world_size": w,
        "divided by world_size once too often": 1 / w,
        "the learning rate is missing": 1 / seen.case.lr,
        "this is the gradient of a sum over rows; the loss is a mean": rows * COLUMNS,
        "this is the gradient of a sum over all rows; the loss is a mean": w * rows * COLUMNS,
        "divided by the rows; mean() divides by all numbers, so by the columns, too": COLUMNS,
        "divided by the rows of the shard; the loss is a mean over them already": 1 / rows,
    }
    return {cause: {"times": times} for cause, times in factors.items()}


def _why_second(seen: Seen, found: list[float]) -> str:
    if any(map(first, map(seen.of, range(seen.world_size)))):
        return "the first step was wrong already"
    return "the first step's gradient is still in .grad, and backward adds to it; set it to None first"


first = equals(
    "as in one process with all rows, a change of the weights by",
    lambda seen: one_process(seen, 1),
    turned(lambda seen, **knobs: one_process(seen, 1, **knobs), _mistakes),
    "this is a rank's own gradient, or a mix of some; average the gradients of all ranks before the step",
    of="first",
    tolerance=1e-9,
)
second = equals(
    "as in one process with all rows, a change of the weights in two steps by",
    lambda seen: one_process(seen, 2),
    lambda seen: (),
    _why_second,
    of="second",
    tolerance=1e-9,
)

STEP = exercise(
    "00.3",
    "One data parallel step (stretch)",
    "parallel_step",
    20,
    act=act,
    rounds=rounds,
    checks={
        "same": ("the replicas stay equal", 1, together, "three"),
        "first": ("the step is that of one process with all rows", 2, first, "three"),
        "second": ("so is the second step", 1, second, "three"),
        "ranks": ("and so it is with another number of ranks", 1, all_of(first, second), "more"),
    },
    hints={
        r"a leaf Variable that requires grad is being used in an in-place": "change the weights under torch.no_grad(), "
        "so that autograd does not record it",
    },
    refused=(
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "ddp_course.parallel.naive.NaiveDDP",
        "ddp_course.parallel.ddp.BucketedDDP",
        "ddp_course.parallel.naive.average_gradients",
    ),
)
