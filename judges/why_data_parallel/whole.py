"""01.1 `whole_gradient(gradients, rows)`: is each shard weighed by its rows?

One call for each case. What a wrong result is, is told by working out the usual wrong ways too.
Read next: `exact.py`, the same on ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch

from ddp_course.grading.compare import close, is_factor, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from ddp_course.launcher.failure import describe

FEATURES = 3
Case = tuple[list[list[float] | None], list[int]]  # each shard's gradient, and its rows


def whole_driver(rank: int, world_size: int, function: Callable, cases: list[Case]) -> list[dict]:
    """Call the function for each case; note what it returned or raised, and whether it changed what it was given."""
    return [_outcome(function, *case) for case in cases]


def _outcome(function: Callable, shards: list, rows: list[int]) -> dict:
    gradients = [None if shard is None else torch.tensor(shard, dtype=torch.float64) for shard in shards]
    given = list(rows)
    try:
        returned = function(gradients, given)
    except NotImplementedError:
        raise
    except Exception as error:
        return {"story": describe(error, 0).story, "changed": False}
    left = [None if gradient is None else gradient.tolist() for gradient in gradients]
    dtype = str(getattr(returned, "dtype", ""))
    return {"result": plain(returned), "dtype": dtype, "changed": (left, given) != (shards, rows)}


def whole_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Equal shards, unequal ones, and some without rows, which have no gradient."""
    groups = {"equal": [_case([n] * w, rng) for w, n in ((4, 3), (3, rng.randint(2, 9)))]}
    groups["unequal"] = [_case(rows, rng) for rows in ([5, 5, 2], rng.sample(range(1, 40), 4))]
    groups["empty"] = [_case(rows, rng) for rows in ([0, 4, rng.randint(5, 9)], [7, 0, 0, 1])]
    notes = answer.run(whole_driver, 1, [case for group in groups.values() for case in group])[0]
    found, faults = iter(notes), {}
    for key, group in groups.items():
        faults[key] = [_fault(case, next(found)) for case in group]
        yield key, next(filter(None, faults[key]), None)
    # Nothing is earned by leaving alone what was not used.
    worked = not all(fault for group in faults.values() for fault in group)
    yield "untouched", _changed_fault(notes) or (None if worked else Fault("a gradient that is right", "none"))


def _case(rows: list[int], rng: Random) -> Case:
    return [[round(rng.uniform(-9, 9), 3) for _ in range(FEATURES)] if n else None for n in rows], rows


def _fault(case: Case, note: dict) -> Fault | None:
    shards, rows = case
    used = [(gradient, n) for gradient, n in zip(shards, rows, strict=True) if n]
    right = [sum(g[i] * n for g, n in used) / sum(rows) for i in range(FEATURES)]
    expected = f"{short(right)} for shards of {rows} rows"
    if "story" in note:
        cause = "a shard without rows has no gradient, but None; leave it out" if 0 in rows else ""
        return Fault(expected, report=note["story"], cause=cause)
    if close(note["result"], right, 1e-9):
        return None
    if note["dtype"] == "torch.float32" and close(note["result"], right, 1e-5):
        cause = "the gradients are float64, the result is float32; begin with torch.zeros_like of one of them"
        return Fault(expected, f"{short(note['result'])} in float32", cause=cause)
    return Fault(expected, short(note["result"]), cause=_cause(note["result"], right, used, rows))


def _cause(found: object, right: list[float], used: list[tuple[list[float], int]], rows: list[int]) -> str:
    total = [sum(g[i] for g, _ in used) for i in range(FEATURES)]
    if found is None:
        return "the function returns nothing; return the gradient"
    if is_factor(found, total, 1 / len(used)) or is_factor(found, total, 1 / len(rows)):
        return "this is the plain mean, in which each shard has the same weight; weigh each by its rows"
    if is_factor(found, right, sum(rows)):
        return "this is the sum over all rows; divide by the number of all rows"
    if is_factor(found, right, sum(rows) / len(rows)):
        return "divided by the number of shards; the weights are rows, so divide by the number of all rows"
    if close(found, total, 1e-9):
        return "this is the sum of the gradients; each has to be weighed by its rows / all rows"
    return "the weight of a shard is its rows / all rows, and the weights add up to 1"


def _changed_fault(notes: list[dict]) -> Fault | None:
    if not any(note["changed"] for note in notes):
        return None
    cause = "an operation in place, such as g *= n or total += g on the first gradient; work on a tensor of your own"
    return Fault("the given gradients as they were", "one was changed", cause=cause)


WHOLE = Exercise(
    "01.1",
    "The gradient of the whole",
    "whole_gradient",
    10,
    (
        Check("equal", "equal shards", 1),
        Check("unequal", "shards of unequal size", 2),
        Check("empty", "shards without rows", 1),
        Check("untouched", "the given tensors are left alone", 1),
    ),
    whole_judge,
)
