"""01.1 `whole_gradient(gradients, rows)`: is each shard weighed by its rows? A pure function.

Read next: `exact.py`, the same on ranks.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

FEATURES = 3


class Case(NamedTuple):
    shards: list[list[float] | None]  # each shard's gradient; without rows there is none
    rows: list[int]


def cases(rng: Random) -> list[Round]:
    """Equal shards, unequal ones, one without slope; then some without rows, where an error costs no more than that."""

    def made(rows: list[int]) -> Case:
        return Case([[round(rng.uniform(-9, 9), 3) for _ in range(FEATURES)] if n else None for n in rows], rows)

    full = [("equal", made([n] * w)) for w, n in ((4, 3), (3, rng.randint(2, 9)))]
    full += [("unequal", made([5, 5, 2])), ("unequal", made(rng.sample(range(1, 40), 4)))]
    full.append(("unequal", Case([[0.0] * FEATURES, *full[0][1].shards[1:]], [4, 1, 2, 9])))
    empty = [("empty", made([0, 4, rng.randint(5, 9)])), ("empty", made([7, 0, 0, 1]))]
    return [Round(1, full, init=False), Round(1, empty, raises=(Exception,), init=False)]


def act(function, case: Case, rank: int, world_size: int) -> Note:
    gradients = [None if shard is None else torch.tensor(shard, dtype=torch.float64) for shard in case.shards]
    given = list(case.rows)
    value = plain(function(gradients, given))
    left = [None if gradient is None else gradient.tolist() for gradient in gradients]
    return Note(value=value, changed=(left, given) != (case.shards, case.rows))


def result(seen: Seen) -> Any:
    cause = "a shard without rows has no gradient, but None; leave it out"
    return Fault("no error", report=seen["story"], cause=cause) if seen["error"] else seen["value"]


def untouched(seen: Seen) -> Any:
    """Nothing is earned by leaving alone what was not used."""
    if seen["changed"]:
        return "changed ones"
    return seen["value"] if len(set(seen.case.rows)) == 1 else "the given gradients and rows as they were"


MISTAKES = """
mean over the shards that have rows | unequal empty | this is the plain mean; weigh each shard by its rows
    sum(rows) => sum(n > 0 for n in rows)
    (n / total) => (1 / total)
mean over all shards | unequal empty | this is the plain mean, also of shards without rows; weigh each by its rows
    sum(rows) => len(rows)
    (n / total) => (1 / total)
sum over the rows | all | this is the sum over all rows; divide by the number of all rows
    (n / total) => n
divided by the number of shards | all | the weights are rows, so divide by the number of all rows, not of shards
    sum(rows) => len(rows)
sum of the gradients | all | each gradient has to be weighed by its rows / all rows
    (n / total) => 1
None is a factor | empty | a shard without rows has no gradient, but None
    strict=True) if n > 0 => strict=True)
slipped by one | empty | a shard without rows has a place in both lists: leave it out of both
    zip(gradients, rows, strict=True) => zip([g for g in gradients if g is not None], rows)
a gradient of zeros is no gradient | unequal | a shard may have rows and a gradient of zeros: its rows count
    sum(rows) => sum(n for g, n in zip(gradients, rows) if n and g.any())
in place | untouched | an operation in place, such as g *= n; work on a tensor of your own
    gradient * (n / total) => gradient.mul_(n / total)
zeros for None | untouched | the given list has changed; work on a list of your own
    total = sum(rows) => gradients[:] = [torch.zeros(3).double() if g is None else g for g in gradients]
    total = sum(rows)
in float32 | all | the gradients are float64, the result is float32
    gradient * => gradient.float() *
returns nothing | all | the function returns nothing; return the gradient
    return sum => sum
numbers in a tensor of float32 | all | the gradients are float64, the result is float32 | tests
    def whole_gradient(gradients, rows):
        total = torch.zeros(3)
        for gradient, n in zip(gradients, rows):
            if n > 0:
                total += n / sum(rows) * gradient
        return total
"""

WORDS = "return one vector, like the gradients; the weight of a shard is its rows / all rows"
WHOLE = exercise(
    *("01.1", "The gradient of the whole", "whole_gradient", 10),
    cases=cases,
    act=act,
    said=lambda seen: f"shards of {seen.case.rows} rows:",
    mistakes=MISTAKES,
    tolerance=1e-9,
    checks={
        "equal": ("equal shards", 1, "equal", result, WORDS),
        "unequal": ("shards of unequal size", 2, "unequal", result, WORDS),
        "empty": ("shards without rows", 1, "empty", result, WORDS),
        "untouched": ("the given tensors are left alone", 1, "equal unequal empty", untouched, WORDS),
    },
)  # fmt: skip
