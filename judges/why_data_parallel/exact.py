"""01.2 `exact_gradient(rank, world_size, model, x, y)`: is it the whole batch's gradient, however the rows are split?

All is float64, and the function is called twice. Which collectives an answer uses is its own affair.
Read next: `fit.py`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from ddp_course.grading.differential import exercise, value
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.rounds import Round, Seen

FEATURES = 4

Case = tuple[int, list[int]]  # a seed, and each rank's rows


def cases(rng: Random) -> list[Round]:
    """Three ranks: equal and unequal shards, then an empty one. Then another number of ranks."""
    seed, n = rng.randrange(10**6), rng.randint(2, 6)
    more = rng.choice(([3, 1], [6, 1, 2, 4]))
    return [
        Round(3, [("equal", (seed, [n] * 3)), ("unequal", (seed, [n, n + 6, 1]))]),
        Round(3, [("empty", (seed, [n + 2, 0, 3])), ("empty", (seed, [0, n, 0]))]),
        Round(len(more), [("ranks", (seed, more))]),
    ]


def shards(seed: int, rows: list[int]) -> list[tasks.Batch]:
    """Return each rank's rows: inputs of shape (n, FEATURES) and targets of shape (n, 1)."""
    n, chance = sum(rows), torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=chance, dtype=torch.float64)
    y = x.square().sum(1, keepdim=True) + torch.arange(n, dtype=torch.float64)[:, None] / n
    return list(zip(x.split(rows), y.split(rows), strict=True))


def act(function, case: Case, rank: int, world_size: int) -> Any:
    """A rank gets its shard; a second call shows what the first one left in the model."""
    model = tasks.net(case[0], FEATURES, 5, 1)
    for _ in range(2):
        found = function(rank, world_size, model, *(part.clone() for part in shards(*case)[rank]))
    return found


def communicates(seen: Seen) -> str:
    return "a collective" if seen["calls"] else "none"


MISTAKES = """
own gradient | all | no collective was called, so a rank knows its own gradient only
    dist.all_reduce(flat) => pass
    dist.all_reduce(rows) => pass
mean of the shards' means | unequal empty ranks | this is the plain mean of the shards' gradients
    .sum().backward() => .sum().div(max(1, len(x))).backward()
    flat / rows => flat / world_size
mean of the means of those that have rows | unequal empty ranks | this is the plain mean of the gradients that there are
    .sum().backward() => .sum().div(max(1, len(x))).backward()
    float(len(x)) => float(len(x) > 0)
sum of the shards' means | equal unequal empty ranks | the gradients are summed over the ranks, not averaged
    .sum().backward() => .sum().div(max(1, len(x))).backward()
    flat / rows => flat
not divided | equal unequal empty ranks | summed over all rows; divide by the number of all rows
    flat / rows => flat
divided by its own rows | equal unequal empty ranks | divided by this rank's own rows; divide by those of all ranks
    dist.all_reduce(rows) => rows.clamp_(min=1)
divided by the ranks | equal unequal empty ranks | divided by the number of ranks; divide by the rows of all ranks
    flat / rows => flat / world_size
.grad is not cleared | equal unequal empty ranks | the first call's gradient is still in .grad, and backward adds to it
    model.zero_grad() => pass
every prediction beside every target | equal unequal empty ranks
| (rows, 1) less (rows,) is (rows, rows): give predictions and targets one shape
    (model(x) - y) => (model(x) - y.flatten())
no rows count as one | empty | a rank without rows adds none to the number of rows
    float(len(x)) => float(max(1, len(x)))
sorted by name | equal unequal empty ranks | all parameters strung together in the order of model.parameters()
    model.parameters() => dict(sorted(model.named_parameters())).values()
returns nothing | equal unequal empty ranks | the function returns nothing; return the gradient as one vector
    return flat => flat
a rank without rows keeps its .grad | empty | a rank without rows has to clear .grad, too
    model.zero_grad() => if len(x):
        model.zero_grad()
    dist.all_reduce(flat) => dist.all_reduce(flat)
    for part, parameter in zip(flat.split([p.numel() for p in model.parameters()]), model.parameters()):
        parameter.grad = part.view_as(parameter).clone()
a rank without rows stays away | empty ranks | one without rows must call them all, too | hangs
    model.zero_grad() => if len(x) == 0:
        return torch.zeros(31)
    model.zero_grad()
a mean over the ranks, by hand | unequal empty ranks | this is the plain mean of the shards' gradients | tests
    def exact_gradient(rank, world_size, model, x, y):
        loss = (model(x) - y).square().mean() if len(x) else model(x).sum()
        parts = torch.autograd.grad(loss, list(model.parameters()))
        for part in parts:
            dist.all_reduce(part)
        return torch.cat([part.flatten() / world_size for part in parts])
"""

WORDS = "each shard's gradient counts with its rows / all rows; sum these over the ranks, and keep none in .grad"
EXACT = exercise(
    *("01.2", "A gradient that is right for any split", "exact_gradient", 20),
    cases=cases,
    act=act,
    said=lambda seen: f"the gradient of all {sum(seen.case[1])} rows, for shards of {seen.case[1]}:",
    mistakes=MISTAKES,
    tolerance=1e-9,
    checks={
        "equal": ("equal shards", 1, "equal", value, WORDS),
        "unequal": ("shards of unequal size", 2, "unequal", value, WORDS),
        "talk": ("it comes from all ranks", 1, "equal unequal", communicates,
                 "no collective was called, so a rank knows its own gradient only"),
        "empty": ("a rank without rows", 2, "empty", value, WORDS),
        "ranks": ("another number of ranks", 1, "ranks", value, WORDS),
    },
    hints={
        "absent: had returned; limit: waited in": "a rank stayed away from a collective that the others wait in; one "
        "without rows must call them all, too",
        r"does not require grad|element 0 of tensors": "the loss must come from the model, also for no rows",
    },
    right="""
rows first, then reduce and broadcast
    def exact_gradient(rank, world_size, model, x, y):
        rows = torch.tensor(len(x))
        dist.all_reduce(rows)
        loss = (model(x) - y).pow(2).sum() / rows
        found = []
        for gradient in torch.autograd.grad(loss, list(model.parameters())):
            dist.reduce(gradient, dst=0)
            dist.broadcast(gradient, src=0)
            found += gradient.flatten().tolist()
        return found
""",
)  # fmt: skip
