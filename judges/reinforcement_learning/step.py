"""19.3 `policy_step(rank, world_size, model, optimizer, rows, max_norm)`: is it the step of one process with all rows?

Unequal rows, a rank without any, and a gradient that is clipped each have a case.

Read next: `programs/train_policy.py`, where DDP does it.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.compare import flat
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # state, action, advantage
LR, MOMENTUM, LOOSE = 0.3, 0.7, 1e9  # LOOSE: a norm that clips nothing


class Case(NamedTuple):
    """The rows of each rank; the gradient is cut to `max_norm`."""

    seed: int
    shards: list[Rows]
    max_norm: float = LOOSE


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Take the same step twice: hooks of the first call would still be there."""
    model, start = (tasks.net(case.seed, 4, 5, 3) for _ in range(2))  # states of 4 numbers, 3 actions
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    for _ in range(2):
        model.load_state_dict(start.state_dict())
        for param in model.parameters():
            param.grad = torch.ones_like(param)  # what the step before has left
        rows = tuple(tensor.clone() for tensor in case.shards[rank])  # two cases have the same
        loss = function(rank, world_size, model, optimizer, rows, case.max_norm)
    loss = plain(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    weights = tasks.weights(model)
    change = [after - before for after, before in zip(weights, tasks.weights(start), strict=True)]
    return Note(weights=weights, change=change, loss=loss)


def cases(rng: Random) -> list[Round]:
    """Equal rows; then, on three ranks, unequal ones, a clipped gradient, and a rank without rows."""
    seed = rng.randint(0, 999)
    equal = [_rows(rng, 12) for _ in range(2)]
    unequal = [_rows(rng, 4 + 9 * rank) for rank in range(3)]  # of two, no order of adding shows
    some = [_rows(rng, rows) for rows in (7, 11)]
    some.insert(rng.choice((1, 2)), _rows(rng, 0))
    named = [("unequal", Case(seed, unequal)), ("clip", Case(seed, unequal, 0.05))]
    return [Round(2, [("equal", Case(seed, equal))]), Round(3, named), Round(3, [("none", Case(seed, some))])]


def _rows(rng: Random, count: int) -> Rows:
    torch.manual_seed(rng.randrange(2**31))
    return torch.randn(count, 4).double(), torch.randint(3, (count,)), 1 + 2 * torch.randn(count).double()


def step(seen: Seen) -> dict[str, Any]:
    bits = all(each["weights"] == seen.everyone[0]["weights"] for each in seen.everyone)
    return {"change of the weights": seen["change"], "the same bits on every rank": bits}


def loss(seen: Seen) -> dict[str, Any]:
    return {"loss": flat(seen["loss"])}


MEAN = "the gradient is that of -advantage * log_prob, averaged over the rows of all ranks"
WEIGH = (
    "this is the mean of the ranks' means; a rank with few rows gives each of them more weight. Divide each rank's sum "
    "by the rows of all ranks"
)
EARLY = "clipped before the average, on each rank; the norm that counts is that of the averaged gradient"
ALONE = (
    "the gradient of this rank's rows alone: average it over the ranks; a DDP object that nobody holds is gone before "
    "backward: keep it in a variable"
)
MISTAKES = f"""
no talk | all | {ALONE}
    dist.all_reduce(message) =>
the gradients do not travel | equal unequal clip none | {ALONE}
    dist.all_reduce(message) => own = message.clone()
    dist.all_reduce(message)
    message[2:] = world_size * own[2:]
the sum | equal unequal none | this is the sum over all rows; divide by the rows of all ranks
    (part / count) => part
divided by the ranks | equal unequal none | divided by the number of ranks; divide by the rows of all ranks
    (part / count) => (part / world_size)
divided twice | equal unequal none | divided by the rows of all ranks, and by the number of ranks as well
    (part / count) => (part / count / world_size)
a mean of means | unequal clip none | {WEIGH}
    (part / count) => (part / world_size)
    count = torch => for param in params:
        param.grad /= max(1, len(action))
    count = torch
old gradients stay | equal unequal clip none
| the gradients of the step before are still there: optimizer.zero_grad() first
    optimizer.zero_grad() =>
old gradients stay in .grad | equal unequal clip none
| what the step before has left is still in .grad: optimizer.zero_grad() first
    (part / count) => (part / count + 1)
the wrong sign | all | the sign: the loss is -advantage * log_prob
    -(advantage => (advantage
no step | equal unequal clip none | nothing has changed: call optimizer.step(), on every rank
    optimizer.step() =>
hooks that stay | equal unequal none | a hook that one call registers is still there in the next: remove it
    loss.backward() => for param in model.parameters():
        param.register_hook(lambda gradient: dist.all_reduce(gradient) or gradient)
    loss.backward()
    param.grad.flatten() => param.grad.flatten() / world_size
not clipped | clip | the gradient was not clipped
    torch.nn.utils.clip_grad_norm_(params, max_norm) =>
means clipped before the average | clip | {EARLY}
    torch.nn.utils.clip_grad_norm_(params, max_norm) =>
    count = torch => for param in params:
        param.grad /= max(1, len(action))
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    for param in params:
        param.grad *= len(action)
    count = torch
sums clipped before the average | clip | {EARLY}
    torch.nn.utils.clip_grad_norm_(params, max_norm) =>
    count = torch => torch.nn.utils.clip_grad_norm_(params, max_norm)
    count = torch
each rank adds its own part first | unequal clip
| the ranks add up in different orders; use one all_reduce, whose result is the same on every rank
    dist.all_reduce(message) => every = [torch.empty_like(message) for _ in range(world_size)]
    dist.all_gather(every, message)
    message = sum(every[(rank + other) % world_size] for other in range(world_size))
the loss of this rank | loss none | this is the mean over this rank's rows
    return total / count => return loss / max(1, len(action))
the loss as a mean of means | loss none | this is the mean of the ranks' means
    return total / count => mean = loss.detach() / max(1, len(action))
    dist.all_reduce(mean)
    return mean / world_size
a mean over no rows | none | a mean over no rows is nan; a sum over no rows is 0, and has a gradient of zeros
    (advantage * log_prob).sum() => (advantage * log_prob).mean() * len(action)
a rank without rows goes home | none | a rank without rows must still enter each collective, with zeros | hangs
    log_prob = => if not len(action):
        return 0.0
    log_prob =
each rank for itself | all | the gradient of this rank's rows alone | tests
    def policy_step(rank, world_size, model, optimizer, rows, max_norm):
        state, action, advantage = rows
        loss = -(advantage * torch.distributions.Categorical(logits=model(state)).log_prob(action)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return loss.item()
a replica that nobody holds | equal unequal clip none | a DDP object that nobody holds is gone before backward | tests
    def policy_step(rank, world_size, model, optimizer, rows, max_norm):
        state, action, advantage = rows
        count = torch.tensor(float(len(action)), dtype=torch.float64)
        dist.all_reduce(count)
        optimizer.zero_grad()
        logits = torch.nn.parallel.DistributedDataParallel(model)(state)
        losses = -advantage * torch.log_softmax(logits, dim=1).gather(1, action[:, None])[:, 0]
        loss = losses.sum() * world_size / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return (mean / world_size).item()
"""

STEP = exercise(
    *("19.3", "One step of all ranks (stretch)", "policy_step", 25),
    cases=cases,
    act=act,
    tolerance=1e-5,
    said=lambda seen: f"as one process with {' + '.join(str(len(shard[1])) for shard in seen.case.shards)} rows:",
    mistakes=MISTAKES,
    checks={
        "equal": ("equal rows: the step of one process", 1, "equal", step, MEAN),
        "unequal": ("unequal rows: each row has the same weight", 2, "unequal", step, MEAN),
        "clip": ("the averaged gradient is clipped", 1, "clip", step,
                 f"{MEAN}; its norm, of all parameters together, is cut to max_norm, not that of each rank's part"),
        "loss": ("the loss is that of all rows", 1, "unequal", loss, "return the mean loss, on every rank"),
        "none": ("a rank without rows", 1, "none", lambda seen: step(seen) | loss(seen),
                 f"{MEAN}; return the mean loss, on every rank"),
    },
    hints={
        r"reshape tensor of 0 elements": "torch.distributions refuses no rows; torch.log_softmax takes them",
        "absent|limit": "a rank without rows must still enter each collective, with zeros",
        r"NoneType.*grad|grad.*NoneType": "a rank without rows has no gradient: let its loss be a sum over no rows",
    },
)  # fmt: skip
