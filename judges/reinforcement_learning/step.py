"""19.3 `policy_step(rank, world_size, model, optimizer, rows, max_norm)`: is it the step of one process with all rows?

The judge takes the same step itself, with all rows, in float64. Unequal rows, a rank without any, and a gradient that
is clipped each have a case, so each typical slip shows in one of them.

Read next: `ddp_course/train/policy.py`, where DDP does it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.expect import alike, all_of, equals, exercise
from ddp_course.grading.vocabulary.play import Note, Round, Seen

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # state, action, advantage
LR, MOMENTUM, LOOSE = 0.3, 0.7, 1e9  # LOOSE: a norm that clips nothing


@dataclass(frozen=True)
class Case:
    """The rows of each rank; the gradient is cut to `max_norm`."""

    seed: int
    shards: list[Rows]
    max_norm: float = LOOSE

    def model(self) -> nn.Module:
        """Return a small policy: 4 numbers of a state to the logits of 3 actions."""
        return tasks.net(self.seed, 4, 5, 3)


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note of the same step, taken twice, the weights, what was returned, and whether a DDP object was lost."""
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    for _ in range(2):  # hooks of the first call would still be there
        model.load_state_dict(case.model().state_dict())
        for param in model.parameters():
            param.grad = torch.ones_like(param)  # what the step before has left
        with _replicas_watched(model) as lost:
            rows = tuple(tensor.clone() for tensor in case.shards[rank])  # two cases have the same
            loss = function(rank, world_size, model, optimizer, rows, case.max_norm)
    loss = plain(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    return Note(weights=tasks.weights(model), loss=loss, lost=any(lost))


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


def rounds(rng: Random) -> list[Round]:
    """Equal rows; then, on three ranks, unequal ones, a clipped gradient, and a rank without rows."""
    seed = rng.randint(0, 999)
    equal = [_rows(rng, 12) for _ in range(2)]
    unequal = [_rows(rng, 4 + 9 * rank) for rank in range(3)]  # of two, no order of adding shows
    some = [_rows(rng, rows) for rows in (7, 11)]
    some.insert(rng.choice((1, 2)), _rows(rng, 0))
    cases = [("unequal", Case(seed, unequal)), ("clip", Case(seed, unequal, 0.05))]
    return [Round(2, [("equal", Case(seed, equal))]), Round(3, cases), Round(3, [("none", Case(seed, some))])]


def _rows(rng: Random, count: int) -> Rows:
    torch.manual_seed(rng.randrange(2**31))
    return torch.randn(count, 4).double(), torch.randint(3, (count,)), 1 + 2 * torch.randn(count).double()


# --- One process, rightly and wrongly --------------------------------------------------------------


def _losses(logits: torch.Tensor, taken: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    action, advantage = taken
    return -advantage * torch.log_softmax(logits, dim=-1)[torch.arange(len(action)), action]


def _gradient(seen: Seen, rows: Rows, reduce: Callable = torch.mean) -> torch.Tensor:
    """Return the gradient of these rows, (P,); 0 where there are none."""
    reduce = reduce if len(rows[1]) else torch.sum
    return tasks.gradient(seen.case.model(), (rows[0], rows[1:]), lambda *given: reduce(_losses(*given)))


def _clipped(gradient_P: torch.Tensor, max_norm: float) -> torch.Tensor:
    return gradient_P * min(1.0, max_norm / (gradient_P.norm().item() + 1e-6))


def _after(seen: Seen, gradient_P: torch.Tensor) -> list[float]:
    model = seen.case.model()
    tasks.descend(model, gradient_P, LR * (1 + MOMENTUM))  # the second of two equal steps
    return tasks.weights(model)


def _every(seen: Seen) -> Rows:
    return tuple(map(torch.cat, zip(*seen.case.shards, strict=True)))


def _slips(seen: Seen) -> Iterator[tuple[str, list[float]]]:
    yield from ((cause, _after(seen, gradient_P)) for cause, gradient_P in _gradients(seen))


def _gradients(seen: Seen) -> Iterator[tuple[str, torch.Tensor]]:
    shards, max_norm, world = seen.case.shards, seen.case.max_norm, seen.world_size
    right, total = (_gradient(seen, _every(seen), way) for way in (torch.mean, torch.sum))
    means, sums = ([_gradient(seen, rows, way) for rows in shards] for way in (torch.mean, torch.sum))
    counts, mine = [len(rows[1]) for rows in shards], means[seen.rank]

    def clipped(gradient_P: torch.Tensor) -> torch.Tensor:
        return _clipped(gradient_P, max_norm)

    kept = "the gradients of the step before are still there: optimizer.zero_grad() first"
    yield "nothing has changed: call optimizer.step(), on every rank", 0 * right
    yield kept, clipped(right) + 1
    for left in (1, world / sum(counts)):  # ones, averaged over the ranks, or divided by all rows as the rest
        yield kept, clipped(right + left)
    yield "the sign: the loss is -advantage * log_prob", -clipped(right)
    yield "the gradient of this rank's rows alone", mine
    yield "the gradient of this rank's rows alone", clipped(mine)
    weigh = (
        "this is the mean of the ranks' means; a rank with few rows gives each of them more weight. Divide each rank's "
        "sum by the rows of all ranks"
    )
    yield weigh, clipped(sum(means) / world)
    yield "this is the sum over all rows; divide by the rows of all ranks", clipped(total)
    yield "divided by the number of ranks; divide by the rows of all ranks", clipped(total / world)
    yield "divided by the rows of all ranks, and by the number of ranks as well", clipped(right / world)
    yield "the gradient was not clipped", right
    early = "clipped before the average, on each rank; the norm that counts is that of the averaged gradient"
    rows = sum(counts)
    own = (means, sums, [part / rows for part in sums], [part * world / rows for part in sums])
    weights = ([1.0] * world, [1 / world] * world, [1 / rows] * world, [n / rows for n in counts])
    for parts, by in product(own, weights) if max_norm < LOOSE else ():
        found = sum(clipped(part) * weight for part, weight in zip(parts, by, strict=True))
        yield early, found  # and perhaps once more
        yield early, clipped(found)


# --- What is expected ------------------------------------------------------------------------------


def _otherwise(seen: Seen, found: list[float]) -> str:
    words = "the gradient is that of -advantage * log_prob, averaged over the rows of all ranks"
    return words + "; its norm, of all parameters together, is cut to max_norm" * (seen.case.max_norm < LOOSE)


weights = equals(
    lambda seen, right: (
        f"first weight {right[0]:.5f}, as one process with {' + '.join(str(len(s[1])) for s in seen.case.shards)} rows"
    ),
    lambda seen: _after(seen, _clipped(_gradient(seen, _every(seen)), seen.case.max_norm)),
    _slips,
    _otherwise,
    of="weights",
    tolerance=1e-7,
    shown=lambda found: found[0],
)
order = "the ranks add up in different orders; use one all_reduce, whose result is the same on every rank"


def step(seen: Seen) -> Fault | None:
    """The weights are right on every rank, and then the same to the last bit."""
    fault = weights(seen)
    if fault and any(note["lost"] for note in seen.everyone):
        return replace(fault, cause="a DDP object that nobody holds is gone before backward: keep it in a variable")
    return fault or alike(order, of="weights")(seen)


def _by_rank(seen: Seen) -> list[torch.Tensor]:
    """Return the losses of each rank's rows, before the step."""
    model = seen.case.model()
    return [_losses(model(state), taken).detach() for state, *taken in seen.case.shards]


def _loss_slips(seen: Seen) -> Iterator[tuple[str, torch.Tensor]]:
    parts, mine, rows = _by_rank(seen), _by_rank(seen)[seen.rank], len(_every(seen)[1])
    yield "this is the mean over this rank's rows", mine.mean()
    yield "this is the mean of the ranks' means", sum(part.mean() for part in parts) / len(parts)
    yield "this is this rank's part; average it over the ranks", mine.sum() * len(parts) / rows
    yield "this is the sum over all rows", torch.cat(parts).sum()


loss = equals(
    lambda seen, right: f"{right:.5f}, the mean over the rows of all ranks, before the step",
    lambda seen: torch.cat(_by_rank(seen)).mean().item(),
    _loss_slips,
    "return the mean loss, on every rank",
    of="loss",
    tolerance=1e-5,
    form=lambda found: "" if isinstance(found, float) else "return the mean loss, on every rank",
)

STEP = exercise(
    "19.3",
    "One step of all ranks (stretch)",
    "policy_step",
    25,
    act=act,
    rounds=rounds,
    checks={
        "equal": ("equal rows: the step of one process", 1, step, "equal"),
        "unequal": ("unequal rows: each row has the same weight", 2, step, "unequal"),
        "clip": ("the averaged gradient is clipped", 1, step, "clip"),
        "loss": ("the loss is that of all rows", 1, loss, "unequal"),
        "none": ("a rank without rows", 1, all_of(step, loss), "none"),
    },
    hints={
        r"reshape tensor of 0 elements": "torch.distributions refuses no rows; torch.log_softmax takes them",
        "absent|limit": "a rank without rows must still enter each collective, with zeros",
        r"NoneType.*grad|grad.*NoneType": "a rank without rows has no gradient: let its loss be a sum over no rows",
    },
)
