"""01.2 `exact_gradient(rank, world_size, model, x, y)`: is it the whole batch's gradient, however the rows are split?

The result is compared with one process on all rows, in float64. Which collectives an answer uses is its own affair.
Read next: `fit.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn

from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.compare import short
from ddp_course.grading.vocabulary.expect import equals, exercise, speaks, turned
from ddp_course.grading.vocabulary.play import Round, Seen

FEATURES, NUMBERS = 4, 31  # numbers: of the gradient


@dataclass(frozen=True)
class Case:
    """How many rows each rank has."""

    seed: int
    rows: list[int]

    def model(self) -> nn.Module:
        """Return the same small network on every rank."""
        return tasks.net(self.seed, FEATURES, 5, 1)

    def shards(self) -> list[tasks.Batch]:
        """Return each rank's rows: inputs of shape (n, features) and targets of shape (n, 1)."""
        n, chance = sum(self.rows), torch.Generator().manual_seed(self.seed)
        x = torch.randn(n, FEATURES, generator=chance, dtype=torch.float64)
        y = x.square().sum(1, keepdim=True) + torch.arange(n, dtype=torch.float64)[:, None] / n
        return list(zip(x.split(self.rows), y.split(self.rows), strict=True))


def act(function, case: Case, rank: int, world_size: int) -> Any:
    """A rank gets its shard; a second call shows what the first one left in the model."""
    model = case.model()
    for _ in range(2):
        found = function(rank, world_size, model, *(part.clone() for part in case.shards()[rank]))
    return found


def rounds(rng: Random) -> list[Round]:
    """Three ranks: equal and unequal shards, then an empty one. Then another number of ranks."""
    seed, n = rng.randrange(10**6), rng.randint(2, 6)
    more = rng.choice(([3, 1], [6, 1, 2, 4]))
    return [
        Round(3, [("equal", Case(seed, [n] * 3)), ("unequal", Case(seed, [n, n + 6, 1]))]),
        Round(3, [("empty", Case(seed, [n + 2, 0, 3])), ("empty", Case(seed, [0, n, 0]))]),
        Round(len(more), [("ranks", Case(seed, more))]),
    ]


def weighed(seen: Seen, weights: Sequence[float] | None = None, times: float = 1) -> torch.Tensor:
    """Return the sum of the shards' gradients, each times its rows / all rows, or times its weight."""
    rows, model = seen.case.rows, seen.case.model()
    weights = weights or [n / sum(rows) for n in rows]
    shards = zip(weights, seen.case.shards(), strict=True)
    return times * sum(weight * tasks.gradient(model, shard) for weight, shard in shards if len(shard[0]))


def _mistakes(seen: Seen) -> dict[str, dict]:
    rows, w, mine = seen.case.rows, seen.world_size, max(1, seen.case.rows[seen.rank])
    plain_mean = "this is the plain mean of the shards' gradients"
    return {
        "this is the rank's own gradient; nothing from the other ranks is in it":
            {"weights": [float(rank == seen.rank) for rank in range(w)]},
        f"{plain_mean}; a shard's weight is its rows / all rows": {"weights": [1 / w] * w},
        f"{plain_mean} that have rows; a shard's weight is its rows / all rows":
            {"weights": [1 / sum(n > 0 for n in rows)] * w},
        "the gradients are summed over the ranks, not averaged": {"weights": [1.0] * w},
        "summed over all rows; divide by the number of all rows, which is a sum over the ranks": {"times": sum(rows)},
        "divided by this rank's own rows; divide by the rows of all ranks": {"times": sum(rows) / mine},
        "divided by the number of ranks once too often: the weights add up to 1 already": {"times": 1 / w},
        "divided by the number of ranks; divide by the rows of all ranks": {"times": sum(rows) / w},
        "the first call's gradient is still in .grad, and backward adds to it; set it to None first": {"times": 2},
    }  # fmt: skip


def _form(found: Any) -> str:
    if found is None:
        return "the function returns nothing; return the gradient as one vector"
    if not isinstance(found, list) or len(found) != NUMBERS:
        return f"return one vector with all {NUMBERS} numbers, in the order of model.parameters()"
    return ""


right = equals(
    lambda seen, right: (
        f"{short(right.tolist())}, the gradient of all {sum(seen.case.rows)} rows, for shards of {seen.case.rows}"
    ),
    weighed,
    turned(weighed, _mistakes),
    "each shard's gradient counts with its rows / all rows; sum these over the ranks, and keep none in .grad",
    tolerance=1e-9,
    form=_form,
)
talk = speaks("the ranks never talked, so no rank can know the others' rows")

EXACT = exercise(
    "01.2",
    "A gradient that is right for any split",
    "exact_gradient",
    20,
    act=act,
    rounds=rounds,
    checks={
        "equal": ("equal shards", 1, right, "equal"),
        "unequal": ("shards of unequal size", 2, right, "unequal"),
        "talk": ("it comes from all ranks", 1, talk, "equal unequal"),
        "empty": ("a rank without rows", 2, right, "empty"),
        "ranks": ("another number of ranks", 1, right, "ranks"),
    },
    hints={
        "absent: had returned; limit: waited in": "a rank stayed away from a collective that the "
        "others wait in; one without rows must call them all, too",
        r"does not require grad|element 0 of tensors": "the loss must come from the model, also for no rows",
    },
)
