"""01.1 `whole_gradient(gradients, rows)`: is each shard weighed by its rows?

One call for each case. What a wrong result is, is told by working out the usual wrong ways too.
Read next: `exact.py`, the same on ranks.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import close, short
from ddp_course.grading.vocabulary.expect import all_of, equals, exercise, turned
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from ddp_course.launcher.failure import describe

FEATURES = 3


class Case(NamedTuple):
    """Each shard's gradient, which is None where there are no rows, and its rows."""

    shards: list[list[float] | None]
    rows: list[int]

    def used(self) -> list[tuple[list[float], int]]:
        """Return the gradients that there are, with their rows."""
        return [(gradient, n) for gradient, n in zip(self.shards, self.rows, strict=True) if gradient]


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note what was returned or raised, and whether something that was given has changed."""
    gradients = [None if shard is None else torch.tensor(shard, dtype=torch.float64) for shard in case.shards]
    given = list(case.rows)
    try:
        returned = function(gradients, given)
    except NotImplementedError:
        raise
    except Exception as error:  # costs this case, and no other
        return Note(story=describe(error, 0).story)
    left = [None if gradient is None else gradient.tolist() for gradient in gradients]
    number = str(getattr(returned, "dtype", ""))
    return Note(value=plain(returned), dtype=number, changed=(left, given) != (case.shards, case.rows))


def rounds(rng: Random) -> list[Round]:
    """Equal shards, unequal ones, and some without rows, which have no gradient."""
    rows = [("equal", [n] * w) for w, n in ((4, 3), (3, rng.randint(2, 9)))]
    rows += [("unequal", [5, 5, 2]), ("unequal", rng.sample(range(1, 40), 4))]
    rows += [("empty", [0, 4, rng.randint(5, 9)]), ("empty", [7, 0, 0, 1])]
    cases = [
        (name, Case([[round(rng.uniform(-9, 9), 3) for _ in range(FEATURES)] if n else None for n in each], each))
        for name, each in rows
    ]
    cases.append(("unequal", Case([[0.0] * FEATURES, *cases[0][1].shards[1:]], [4, 1, 2, 9])))  # no slope, but rows
    return [Round(1, cases, init=False)]


def weighed(seen: Seen, weigh: bool = True, by: int | None = None) -> list[float]:
    """Return the sum of the gradients, each times its rows, divided by all rows; or by something else."""
    used = [(gradient, n if weigh else 1) for gradient, n in seen.case.used()]
    return [sum(gradient[i] * n for gradient, n in used) / (by or sum(seen.case.rows)) for i in range(FEATURES)]


def _mistakes(seen: Seen) -> dict[str, dict]:
    shards, plain_mean = len(seen.case.rows), "this is the plain mean, in which each shard has the same weight"
    return {
        f"{plain_mean}; weigh each by its rows": {"weigh": False, "by": len(seen.case.used())},
        f"{plain_mean}, also those without rows; weigh each by its rows": {"weigh": False, "by": shards},
        "this is the sum over all rows; divide by the number of all rows": {"by": 1},
        "divided by the number of shards; the weights are rows, so divide by the number of all rows": {"by": shards},
        "this is the sum of the gradients; each has to be weighed by its rows / all rows": {"weigh": False, "by": 1},
    }


def _said(seen: Seen, right: list[float]) -> str:
    return f"{short(right)} for shards of {seen.case.rows} rows"


def finished(seen: Seen) -> Fault | None:
    """There was no error, and the result has all digits."""
    right, found = weighed(seen), seen["value"]
    if seen["story"]:
        cause = "a shard without rows has no gradient, but None; leave it out" if 0 in seen.case.rows else ""
        return Fault(_said(seen, right), report=seen["story"], cause=cause)
    if seen["dtype"] == "torch.float32" and close(found, right, 1e-5) and not close(found, right, 1e-9):
        cause = "the gradients are float64, the result is float32; begin with torch.zeros_like of one of them"
        return Fault(_said(seen, right), f"{short(found)} in float32", cause=cause)
    return None


def _form(found: Any) -> str:
    if found is None:
        return "the function returns nothing; return the gradient"
    return "" if isinstance(found, list) and len(found) == FEATURES else "return one vector, like the gradients"


right = all_of(
    finished,
    equals(
        _said,
        weighed,
        turned(weighed, _mistakes),
        "the weight of a shard is its rows / all rows, and the weights add up to 1",
        tolerance=1e-9,
        form=_form,
    ),
)


def untouched(seen: Seen) -> Fault | None:
    """What was given is as it was, and was used."""
    if seen["changed"]:
        cause = (
            "an operation in place, such as g *= n or total += g on the first gradient; work on a tensor of your own"
        )
        return Fault("the given gradients as they were", "one was changed", cause=cause)
    # Nothing is earned by leaving alone what was not used.
    idle = len(set(seen.case.rows)) == 1 and right(seen)
    return Fault("a gradient that is right", "none") if idle else None


WHOLE = exercise(
    "01.1",
    "The gradient of the whole",
    "whole_gradient",
    10,
    act=act,
    rounds=rounds,
    checks={
        "equal": ("equal shards", 1, right, "equal"),
        "unequal": ("shards of unequal size", 2, right, "unequal"),
        "empty": ("shards without rows", 1, right, "empty"),
        "untouched": ("the given tensors are left alone", 1, untouched, "equal unequal empty"),
    },
)
