"""15.3 `policy_step(rank, world_size, model, optimizer, rows, max_norm)`: is it the step of one process with all rows?

The judge takes the same step itself, with all rows, in float64. Unequal rows, a rank without any, and a gradient that
is clipped each have a case, so each typical slip shows in one of them.

Read next: `ddp_course/train/policy.py`, where DDP does it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.grading.compare import close, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # state, action, advantage
SAME, LR, LOOSE = 1e-7, 0.5, 1e9  # LOOSE: a norm that clips nothing


def a_model(seed: int) -> nn.Module:
    """A small policy in float64: 4 numbers of a state to the logits of 3 actions."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def flat_weights(model: nn.Module) -> list[float]:
    return torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()


def step_driver(
    rank: int, world_size: int, function: Callable, cases: list[tuple[list[Rows], float]], seed: int
) -> list:
    """Take a step in each case; note the weights after it and what was returned."""
    notes = []
    for shards, max_norm in cases:
        model = a_model(seed)
        optimizer = torch.optim.SGD(model.parameters(), LR)
        for param in model.parameters():
            param.grad = torch.ones_like(param)  # what the step before has left
        rows = tuple(tensor.clone() for tensor in shards[rank])
        with _replicas_watched(model) as lost:
            loss = function(rank, world_size, model, optimizer, rows, max_norm)
        loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        notes.append({"weights": flat_weights(model), "loss": plain(loss), "lost": any(lost)})
    return notes


@contextmanager
def _replicas_watched(model: nn.Module) -> Iterator[list[bool]]:
    """Within the block, note at each gradient whether a DDP object was made and is gone already."""
    made, lost, init = [], [], DistributedDataParallel.__init__

    def noted(self: DistributedDataParallel, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        made.append(weakref.ref(self))

    for param in model.parameters():
        param.register_hook(lambda gradient: lost.append(bool(made) and all(each() is None for each in made)))
    with mock.patch.object(DistributedDataParallel, "__init__", noted):
        yield lost


def step_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Equal rows, unequal rows, a rank without rows, and a clipped gradient."""
    seed, world = rng.randint(0, 999), rng.choice((2, 3))
    equal = [_rows(rng, 12) for _ in range(world)]
    unequal = [_rows(rng, 4 + 9 * rank) for rank in range(world)]
    cases = [(equal, LOOSE), (unequal, LOOSE), (unequal, 0.05)]
    ranks = answer.run(step_driver, world, cases, seed, init=True)
    for i, key in enumerate(("equal", "unequal", "clip")):
        yield key, _first(cases[i], [notes[i] for notes in ranks], seed)
    losses = (_loss_fault(cases[1][0], notes[1]["loss"], r, seed) for r, notes in enumerate(ranks))
    yield "loss", next(filter(None, losses), None)
    some = [_rows(rng, rows) for rows in (7, 11)]
    some.insert(rng.choice((1, 2)), _rows(rng, 0))
    lonely = answer.run(step_driver, 3, [(some, LOOSE)], seed, init=True)
    yield "none", _first((some, LOOSE), [notes[0] for notes in lonely], seed)


def _rows(rng: Random, count: int) -> Rows:
    torch.manual_seed(rng.randrange(2**31))
    return torch.randn(count, 4).double(), torch.randint(3, (count,)), 1 + 2 * torch.randn(count).double()


def _losses(model: nn.Module, rows: Rows) -> torch.Tensor:
    state, action, advantage = rows
    log_prob = torch.log_softmax(model(state), dim=-1)[torch.arange(len(action)), action]
    return -advantage * log_prob


def _gradient(seed: int, rows: Rows, reduce: Callable = torch.mean) -> torch.Tensor:
    model = a_model(seed)
    reduce(_losses(model, rows)).backward()
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def _clipped(gradient: torch.Tensor, max_norm: float) -> torch.Tensor:
    return gradient * min(1.0, max_norm / (gradient.norm().item() + 1e-6))


def _guesses(shards: list[Rows], max_norm: float, rank: int, seed: int) -> Iterator[tuple[torch.Tensor, str]]:
    """The gradients of typical slips, before they are taken off the weights."""
    every = tuple(map(torch.cat, zip(*shards, strict=True)))
    right, total = _gradient(seed, every), _gradient(seed, every, torch.sum)
    means = [_gradient(seed, rows) if len(rows[1]) else torch.zeros_like(right) for rows in shards]
    mine, mean_of_means = means[rank], sum(means) / len(shards)
    sums = [_gradient(seed, rows, torch.sum) for rows in shards]
    kept = "the gradients of the step before are still there: optimizer.zero_grad() first"
    yield _clipped(right, max_norm) + 1, kept
    for left in (1, len(shards) / len(every[1])):  # ones, averaged over the ranks, or divided by all rows as the rest
        yield _clipped(right + left, max_norm), kept
    yield -_clipped(right, max_norm), "the sign: the loss is -advantage * log_prob"
    yield mine, "the gradient of this rank's rows alone"
    yield _clipped(mine, max_norm), "the gradient of this rank's rows alone"
    yield (
        _clipped(mean_of_means, max_norm),
        "this is the mean of the ranks' means; a rank with few rows gives each of them more "
        "weight. Divide each rank's sum by the rows of all ranks",
    )
    yield _clipped(total, max_norm), "this is the sum over all rows; divide by the rows of all ranks"
    yield _clipped(total / len(shards), max_norm), "divided by the number of ranks; divide by the rows of all ranks"
    yield (
        _clipped(right / len(shards), max_norm),
        "divided by the rows of all ranks, and by the number of ranks as well",
    )
    yield right, "the gradient was not clipped"
    if max_norm < LOOSE:
        yield from ((guess, _EARLY) for guess in _clipped_early(means, sums, [len(r[1]) for r in shards], max_norm))


_EARLY = "clipped before the average, on each rank; the norm that counts is that of the averaged gradient"


def _clipped_early(means: list, sums: list, counts: list[int], max_norm: float) -> Iterator[torch.Tensor]:
    """Each way to clip own gradients, then to average them, and perhaps to clip once more."""
    world, rows = len(counts), sum(counts)
    own = (means, sums, [part / rows for part in sums], [part * world / rows for part in sums])
    weights = ([1.0] * world, [1 / world] * world, [1 / rows] * world, [n / rows for n in counts])
    for gradients, weight in product(own, weights):
        found = sum(_clipped(gradient, max_norm) * w for gradient, w in zip(gradients, weight, strict=True))
        yield found
        yield _clipped(found, max_norm)


def _first(case: tuple[list[Rows], float], notes: list[dict], seed: int) -> Fault | None:
    faults = (_weights_fault(case, note["weights"], rank, seed) for rank, note in enumerate(notes))
    fault = next(filter(None, faults), None)
    if fault and any(note["lost"] for note in notes):
        return replace(fault, cause="a DDP object that nobody holds is gone before backward: keep it in a variable")
    if fault or all(note["weights"] == notes[0]["weights"] for note in notes):
        return fault
    rank = next(r for r, note in enumerate(notes) if note["weights"] != notes[0]["weights"])
    cause = "the ranks add up in different orders; use one all_reduce, whose result is the same on every rank"
    return Fault("the same bits on every rank", "others than rank 0's", rank, cause)


def _weights_fault(case: tuple[list[Rows], float], found: list[float], rank: int, seed: int) -> Fault | None:
    shards, max_norm = case
    before = torch.tensor(flat_weights(a_model(seed)), dtype=torch.float64)
    every = tuple(map(torch.cat, zip(*copy.deepcopy(shards), strict=True)))
    right = before - LR * _clipped(_gradient(seed, every), max_norm)
    if close(found, right.tolist(), SAME):
        return None
    if close(found, before.tolist(), SAME):
        cause = "nothing has changed: call optimizer.step(), on every rank"
    else:
        guesses = _guesses(shards, max_norm, rank, seed)
        cause = next((c for g, c in guesses if close(found, (before - LR * g).tolist(), 1e-6)), "")
    rows = " + ".join(str(len(each[1])) for each in shards)
    otherwise = "the gradient is that of -advantage * log_prob, averaged over the rows of all ranks"
    if max_norm < LOOSE:
        otherwise += "; its norm, of all parameters together, is cut to max_norm"
    expected = f"first weight {right[0].item():.5f}, as one process with {rows} rows"
    return Fault(expected, f"{found[0]:.5f}", rank, cause or otherwise)


def _loss_fault(shards: list[Rows], found: Any, rank: int, seed: int) -> Fault | None:
    model = a_model(seed)
    rows = [_losses(model, each).detach() for each in shards]
    right = torch.cat(rows).mean().item()
    if not isinstance(found, list | str | bool) and found is not None and close(found, right, 1e-5):
        return None
    expected = f"{right:.5f}, the mean over the rows of all ranks, before the step"
    guesses = [
        (rows[rank].mean().item(), "this is the mean over this rank's rows"),
        (sum(each.mean().item() for each in rows) / len(rows), "this is the mean of the ranks' means"),
        (
            rows[rank].sum().item() * len(rows) / sum(map(len, rows)),
            "this is this rank's part; average it over the ranks",
        ),
        (torch.cat(rows).sum().item(), "this is the sum over all rows"),
    ]
    cause = next((c for guess, c in guesses if close(found, guess, 1e-5)), "return the mean loss, on every rank")
    return Fault(expected, short(found), rank, cause)


STEP = Exercise(
    "15.3",
    "One step of all ranks (stretch)",
    "policy_step",
    25,
    (
        Check("equal", "equal rows: the step of one process", 1),
        Check("unequal", "unequal rows: each row has the same weight", 2),
        Check("clip", "the averaged gradient is clipped", 1),
        Check("loss", "the loss is that of all rows", 1),
        Check("none", "a rank without rows", 1),
    ),
    step_judge,
    hints=(
        (r"reshape tensor of 0 elements", "torch.distributions refuses no rows; torch.log_softmax takes them"),
        (r"never entered|limit", "a rank without rows must still enter each collective, with zeros"),
        (r"NoneType.*grad|grad.*NoneType", "a rank without rows has no gradient: let its loss be a sum over no rows"),
    ),
)
