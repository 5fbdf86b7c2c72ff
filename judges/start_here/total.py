"""00.1 `sum_of_all(rank, world_size, value)`: does a sum over the ranks reach every rank?

Any collectives will do. The values differ from rank to rank so that each usual slip gives another number.
Read next: `replicas.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from ddp_course.grading.vocabulary.compare import close
from ddp_course.grading.vocabulary.expect import equals, exercise, one_number, speaks
from ddp_course.grading.vocabulary.play import Round, Seen

SAME = 1e-6


def act(function, case: list[float], rank: int, world_size: int) -> Any:
    """A case has the value of each rank."""
    return function(rank, world_size, case[rank])


def rounds(rng: Random) -> list[Round]:
    """Two numbers of ranks, the second with fractions that no rounding keeps; and two ranks with one value."""
    three = [float(value) for value in sorted(rng.sample(range(2, 90), 3))]  # rank 0's is the least
    others = [value + rng.randrange(1, 256, 2) / 256 for value in rng.sample(range(2, 90), rng.choice((2, 4)))]
    return [Round(3, [("three", three), ("equal", [*three[:2], three[0]])]), Round(len(others), [("others", others)])]


def _slips(seen: Seen) -> Iterator[tuple[str, float]]:
    if _has_it(seen):
        return
    values, total, w = seen.case, sum(seen.case), seen.world_size
    yield "this is the rank's own value; the sum did not reach this rank", values[seen.rank]
    yield "reduced twice: the second call added sums", total * w
    yield "this is the mean; the sum is asked for", total / w
    yield "this is the largest value; the operation must be the sum, which is the default", max(values)
    whole = "the fractions are lost: the tensor holds whole numbers; make it of value as it is"
    yield whole, int(total)
    yield whole, sum(map(int, values))


def _has_it(seen: Seen) -> list[int]:
    return [rank for rank in range(seen.world_size) if close(seen.of(rank)["value"], sum(seen.case), SAME)]


def _otherwise(seen: Seen, found: Any) -> str:
    if ranks := _has_it(seen):
        return f"rank {ranks[0]} has the sum, this one does not: reduce has one receiver, all_reduce has all"
    return "some values are missing, or counted twice; one all_reduce adds each rank's value once"


total = equals(
    lambda seen, right: f"{' + '.join(f'{value:g}' for value in seen.case)} = {right:g}",
    lambda seen: sum(seen.case),
    _slips,
    _otherwise,
    tolerance=SAME,
    form=one_number(),
)
talk = speaks("the ranks never talked; a rank knows its own value only, until a collective brings the others'")

TOTAL = exercise(
    "00.1",
    "One sum on every rank",
    "sum_of_all",
    5,
    act=act,
    rounds=rounds,
    checks={
        "sum": ("every rank has the sum", 1, total, "three"),
        "others": ("another number of ranks, other numbers, also equal ones", 1, total, "others equal"),
        "talk": ("the ranks talk", 1, talk, "three others"),
    },
)
