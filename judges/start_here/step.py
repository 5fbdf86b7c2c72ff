"""00.3 `parallel_step(rank, world_size, model, x, y, lr)`: do two such steps give what one process gives?

Compared in float64 with one process that sees all rows, after one step and after a second one on the same replica.
Read next: `judges/why_data_parallel/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import nn

from ddp_course.grading.compare import close, is_factor, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer

Numbers = list[float]
NOTHING_MOVED = "the weights have not changed: the step must be written into the model's own parameters, in place"


def make_model(seed: int) -> nn.Module:
    """Return the same small network on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def make_rows(seed: int, world_size: int, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a shard for each rank: inputs of shape (rows, 3), targets of shape (rows, 1)."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(world_size * rows, 3, generator=chance, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + torch.arange(len(x), dtype=torch.float64)[:, None]
    return list(zip(x.split(rows), y.split(rows), strict=True))


def step_driver(rank: int, world_size: int, function: Callable, seed: int, rows: int, lr: float) -> list[Numbers]:
    """Take two steps with the function; note the weights after each."""
    model, weights = make_model(seed), []
    for step in range(2):
        x, y = make_rows(seed + step, world_size, rows)[rank]
        function(rank, world_size, model, x, y, lr)
        weights.append(flat(model))
    return weights


def flat(model: nn.Module) -> Numbers:
    """Return all weights as one list."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def one_process(seed: int, world_size: int, rows: int, lr: float) -> list[Numbers]:
    """Return the weights before, after one step and after two, of one process with all rows."""
    model = make_model(seed)
    weights = [flat(model)]
    for step in range(2):
        shards = make_rows(seed + step, world_size, rows)
        x, y = (torch.cat(parts) for parts in zip(*shards, strict=True))
        gradients = torch.autograd.grad((model(x) - y).square().mean(), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= lr * gradient
        weights.append(flat(model))
    return weights


def step_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Three ranks, then another number. The first step, the second, and whether the ranks stay together."""
    seed, rows, lr = rng.randrange(10**6), rng.randint(2, 5), rng.choice((0.01, 0.02))
    three = answer.run(step_driver, 3, seed, rows, lr, init=True)
    wanted = one_process(seed, 3, rows, lr)
    yield "same", _apart_fault(three, wanted[0])
    yield "first", _first_fault(three, wanted, seed, rows, lr)
    yield "second", _second_fault(three, wanted)
    size = rng.choice((2, 4))
    more, wanted = answer.run(step_driver, size, seed, rows, lr, init=True), one_process(seed, size, rows, lr)
    yield "ranks", _first_fault(more, wanted, seed, rows, lr) or _second_fault(more, wanted)


def _apart_fault(ranks: list[list[Numbers]], start: Numbers) -> Fault | None:
    for rank, weights in enumerate(ranks):
        if weights[1] == start:
            return Fault("other weights after two steps", "those of the start", rank, NOTHING_MOVED)
        if not close(weights[1], ranks[0][1], 1e-12):  # an order of adding may cost a last bit
            cause = "the replicas drift apart: every rank must apply the same averaged gradient"
            return Fault("the same weights on all ranks after two steps", "other weights than rank 0's", rank, cause)
    return None


def _first_fault(ranks: list, wanted: list[Numbers], seed: int, rows: int, lr: float) -> Fault | None:
    for rank, weights in enumerate(ranks):
        if not close(weights[0], wanted[1], 1e-9):
            moved = [after - before for after, before in zip(weights[0], wanted[0], strict=True)]
            right = [after - before for after, before in zip(wanted[1], wanted[0], strict=True)]
            expected = f"a change of the weights by {short(right)}, as in one process with all rows"
            return Fault(expected, short(moved), rank, _cause(moved, right, len(ranks), rows, lr))
    return None


def _cause(moved: Numbers, right: Numbers, world_size: int, rows: int, lr: float) -> str:
    if not any(moved):
        return NOTHING_MOVED
    for factor, cause in (
        (-1, "the step goes uphill: subtract the gradient"),
        (world_size, "the gradients are summed over the ranks, not averaged: divide by world_size"),
        (1 / world_size, "divided by world_size once too often"),
        (1 / lr, "the learning rate is missing"),
        (rows, "this is the gradient of a sum over rows; the loss is a mean"),
        (world_size * rows, "this is the gradient of a sum over all rows; the loss is a mean"),
        (1 / rows, "divided by the rows of the shard; the loss is a mean over them already"),
    ):
        if is_factor(moved, right, factor):
            return cause
    return "this is a rank's own gradient, or a mix of some; average the gradients of all ranks before the step"


def _second_fault(ranks: list, wanted: list[Numbers]) -> Fault | None:
    for rank, weights in enumerate(ranks):
        if not close(weights[1], wanted[2], 1e-9):
            cause = (
                "the first step's gradient is still in .grad, and backward adds to it; set it to None first"
                if all(close(one[0], wanted[1], 1e-9) for one in ranks)
                else "the first step was wrong already"
            )
            return Fault(f"{short(wanted[2])} after the second step", short(weights[1]), rank, cause)
    return None


STEP = Exercise(
    "00.3",
    "One data parallel step (stretch)",
    "parallel_step",
    20,
    (
        Check("same", "the replicas stay equal", 1),
        Check("first", "the step is that of one process with all rows", 2),
        Check("second", "so is the second step", 1),
        Check("ranks", "and so it is with another number of ranks", 1),
    ),
    step_judge,
    hints=(
        (
            r"a leaf Variable that requires grad is being used in an in-place",
            "change the weights under torch.no_grad(), so that autograd does not record it",
        ),
    ),
    refused=(
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "ddp_course.parallel.naive.NaiveDDP",
        "ddp_course.parallel.ddp.BucketedDDP",
        "ddp_course.parallel.naive.average_gradients",
    ),
)
