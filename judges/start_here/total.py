"""00.1 `sum_of_all(rank, world_size, value)`: does a sum over the ranks reach every rank?

Any collectives will do. The values differ from rank to rank so that each usual slip gives another number.
Read next: `replicas.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from ddp_course.grading.observe import Collectives


def total_driver(rank: int, world_size: int, function: Callable, values: list[float]) -> dict:
    """Call the function; note its result and how often the rank talked."""
    with Collectives() as seen:
        result = plain(function(rank, world_size, values[rank]))
    return {"result": result, "talks": len(seen.calls)}


def total_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Two sets of ranks, the second with fractions."""
    values = [float(value) for value in sorted(rng.sample(range(2, 90), 3))]  # rank 0's is the least
    first = answer.run(total_driver, 3, values, init=True)
    yield "sum", _first_fault(values, first)
    others = [value + 0.25 for value in rng.sample(range(2, 90), rng.choice((2, 4)))]
    second = answer.run(total_driver, len(others), others, init=True)
    yield "others", _first_fault(others, second)
    silent = next((rank for notes in (first, second) for rank, note in enumerate(notes) if not note["talks"]), None)
    cause = "the ranks never talked; a rank knows its own value only, until a collective brings the others'"
    yield "talk", None if silent is None else Fault("a collective", "none", silent, cause)


def _first_fault(values: list[float], notes: list[dict]) -> Fault | None:
    right = [_is_sum(note["result"], values) for note in notes]
    if all(right):
        return None
    rank = right.index(False)
    found, total = notes[rank]["result"], sum(values)
    cause = _cause(found, values, rank)
    if any(right):
        cause = f"rank {right.index(True)} has the sum, this one does not: reduce has one receiver, all_reduce has all"
    return Fault(f"{' + '.join(f'{v:g}' for v in values)} = {total:g}", repr(found), rank, cause)


def _is_sum(found: Any, values: list[float]) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and abs(found - sum(values)) < 1e-3


def _cause(found: Any, values: list[float], rank: int) -> str:
    total = sum(values)
    if found is None:
        return "all_reduce changes the tensor in place and returns None; return the tensor"
    if not isinstance(found, int | float) or isinstance(found, bool):
        return "return one number: the sum"
    if found == values[rank]:
        return "this is the rank's own value; the sum did not reach this rank"
    if abs(found - total * len(values)) < 1e-3:
        return "reduced twice: the second call added sums"
    if abs(found * len(values) - total) < 1e-3:
        return "this is the mean; the sum is asked for"
    if found == max(values):
        return "this is the largest value; the operation must be the sum, which is the default"
    if abs(found - int(total)) < 1e-3 or abs(found - sum(map(int, values))) < 1e-3:
        return "the fractions are lost: the tensor holds whole numbers; make it of value as it is"
    return "some values are missing, or counted twice; one all_reduce adds each rank's value once"


TOTAL = Exercise(
    "00.1",
    "One sum on every rank",
    "sum_of_all",
    5,
    (
        Check("sum", "every rank has the sum", 1),
        Check("others", "another number of ranks, other numbers", 1),
        Check("talk", "the ranks talk", 1),
    ),
    total_judge,
)
