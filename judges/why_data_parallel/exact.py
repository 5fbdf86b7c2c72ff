"""01.2 `exact_gradient(rank, world_size, model, x, y)`: is it the whole batch's gradient, however the rows are split?

The result is compared with one process on all rows, in float64. Which collectives an answer uses is its own affair.
Read next: `fit.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import nn

from ddp_course.grading.compare import close, is_factor, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from ddp_course.grading.observe import Collectives

FEATURES = 4


def make_model(seed: int) -> nn.Module:
    """Return the same small network on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def make_rows(seed: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch: inputs of shape (n, features) and targets of shape (n, 1)."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=chance, dtype=torch.float64)
    return x, x.square().sum(1, keepdim=True) + torch.arange(n, dtype=torch.float64)[:, None] / n


def gradient_of(seed: int, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Return the gradient of the mean squared error over these rows, as one vector."""
    model = make_model(seed)
    loss = (model(x) - y).square().mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).tolist()


def exact_driver(rank: int, world_size: int, function: Callable, seed: int, splits: list[list[int]]) -> list[dict]:
    """Call the function for each split; note its result and how often the rank talked."""
    notes = []
    for rows in splits:
        x, y = make_rows(seed, sum(rows))
        mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        with Collectives() as seen:
            result = plain(function(rank, world_size, make_model(seed), x[mine].clone(), y[mine].clone()))
        notes.append({"result": result, "talks": len(seen.calls)})
    return notes


def exact_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Three ranks: equal and unequal shards, then an empty one. Then another number of ranks."""
    seed, n = rng.randrange(10**6), rng.randint(2, 6)
    splits = {"equal": [n] * 3, "unequal": [n, n + 5, 1]}
    notes = answer.run(exact_driver, 3, seed, list(splits.values()), init=True)
    for index, (key, rows) in enumerate(splits.items()):
        yield key, _first_fault(seed, rows, [ranks[index] for ranks in notes])
    yield "talk", next(filter(None, (_talk_fault(rank, ranks) for rank, ranks in enumerate(notes))), None)
    rows = [n + 2, 0, 3]
    empty = answer.run(exact_driver, 3, seed, [rows], init=True)
    yield "empty", _first_fault(seed, rows, [ranks[0] for ranks in empty])
    rows = rng.choice(([3, 1], [6, 1, 2, 4]))
    others = answer.run(exact_driver, len(rows), seed, [rows], init=True)
    yield "ranks", _first_fault(seed, rows, [ranks[0] for ranks in others])


def _first_fault(seed: int, rows: list[int], notes: list[dict]) -> Fault | None:
    x, y = make_rows(seed, sum(rows))
    right = gradient_of(seed, x, y)
    for rank, note in enumerate(notes):
        if not close(note["result"], right, 1e-9):
            expected = f"{short(right)}, the gradient of all {sum(rows)} rows, for shards of {rows}"
            cause = _cause(seed, rows, rank, note["result"], right)
            return Fault(expected, short(note["result"]), rank, cause)
    return None


def _cause(seed: int, rows: list[int], rank: int, found: object, right: list[float]) -> str:
    x, y = make_rows(seed, sum(rows))
    own = [gradient_of(seed, *shard) for shard in zip(x.split(rows), y.split(rows), strict=True)]
    numbers = found if isinstance(found, list) else []
    if found is None:
        return "the function returns nothing; return the gradient as one vector"
    if len(numbers) != len(right):
        return f"return one vector with all {len(right)} numbers, in the order of model.parameters()"
    if close(numbers, own[rank], 1e-9):
        return "this is the rank's own gradient; nothing from the other ranks is in it"
    with_rows = [g for g, n in zip(own, rows, strict=True) if n]
    total = [sum(values) for values in zip(*with_rows, strict=True)]
    if is_factor(numbers, total, 1 / len(rows)) or is_factor(numbers, total, 1 / len(with_rows)):
        return "this is the plain mean of the shards' gradients; a shard's weight is its rows / all rows"
    if close(numbers, total, 1e-9):
        return "the gradients are summed over the ranks, not averaged"
    for k, cause in (
        (sum(rows), "summed over all rows; divide by the number of all rows, which is a sum over the ranks"),
        (sum(rows) / max(1, rows[rank]), "divided by this rank's own rows; divide by the rows of all ranks"),
        (1 / len(rows), "divided by the number of ranks once too often: the weights add up to 1 already"),
        (sum(rows) / len(rows), "divided by the number of ranks; divide by the rows of all ranks"),
    ):
        if is_factor(numbers, right, k):
            return cause
    return "each shard's gradient counts with its rows / all rows; sum these over the ranks"


def _talk_fault(rank: int, notes: list[dict]) -> Fault | None:
    if all(note["talks"] for note in notes):
        return None
    return Fault("a collective", "none", rank, "the ranks never talked, so no rank can know the others' rows")


EXACT = Exercise(
    "01.2",
    "A gradient that is right for any split",
    "exact_gradient",
    20,
    (
        Check("equal", "equal shards", 1),
        Check("unequal", "shards of unequal size", 2),
        Check("talk", "it comes from all ranks", 1),
        Check("empty", "a rank without rows", 2),
        Check("ranks", "another number of ranks", 1),
    ),
    exact_judge,
    hints=(
        (
            r"(?s)never entered.*had returned|no result after.*waited in",
            "a rank stayed away from a collective that the others wait in; one without rows must call them all, too",
        ),
        (r"does not require grad|element 0 of tensors", "the loss must come from the model, also for no rows"),
    ),
)
