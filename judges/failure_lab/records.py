"""12.4 `first_disagreement(records)`: where do the recorded collectives of the ranks part ways?

The records have the form of torch's Flight Recorder: a number, an operation, the sizes. Each case has one mistake, or
none, at a place that the seed chooses.

Read next: `grading/checking.py`, what becomes of all this.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

Record = tuple[int, str, list[int]]
Case = tuple[list[list[Record]], Any]  # the records by rank, and what is to be found

LENGTH = 12


def in_step(rng: Random, world_size: int) -> list[list[Record]]:
    """Make records that agree. Each rank brings sizes of its own to all_to_all, as it may."""
    records: list[list[Record]] = [[] for _ in range(world_size)]
    for seq in range(1, LENGTH + 1):
        op = rng.choice(("all_reduce", "all_reduce", "broadcast", "all_gather", "barrier", "all_to_all"))
        op = {3: "all_to_all", 8: "all_reduce"}.get(seq, op)
        shared = [] if op == "barrier" else [rng.randint(2, 99), 4]
        for rank, of_rank in enumerate(records):
            of_rank.append((seq, op, [rank + seq, 4] if op == "all_to_all" else list(shared)))
    return records


def with_other_op(rng: Random, world_size: int, swapped: bool = False) -> Case:
    """On one rank, or on a minority, one collective is another one; all that follows differs by chance only."""
    records, seq = in_step(rng, world_size), rng.randint(4, 7)
    odd = sorted(rng.sample(range(world_size), (world_size - 1) // 2 if swapped else 1))
    for rank in odd:
        if swapped:  # two calls in another order: both differ, and the first counts
            records[rank][seq - 1 : seq + 1] = [(seq, "reduce_scatter", [8]), (seq + 1, "gather", [3])]
        else:
            records[rank][seq - 1] = (seq, "reduce_scatter", [8, 4])
    return records, [seq, odd]


def with_other_size(rng: Random, world_size: int) -> Case:
    """One rank brings another shape to an all_reduce."""
    records, odd = in_step(rng, world_size), rng.randrange(world_size)
    seq, op, sizes = records[odd][7]
    records[odd][7] = (seq, op, [sizes[0] + 1, 4])
    return records, [seq, [odd]]


def with_windows(rng: Random, world_size: int) -> Case:
    """The recorders kept windows of other lengths; one rank has another operation in the part that all have."""
    records, found = with_other_op(rng, world_size)
    starts = rng.sample(range(4), world_size) if world_size <= 4 else [0] * world_size
    return [of_rank[start:] for of_rank, start in zip(records, starts, strict=True)], found


def with_late_start(rng: Random) -> Case:
    """One of four ranks has dropped the disagreement; the other three still have it, and nothing differs later."""
    records, (seq, odd) = with_other_op(rng, 4)
    late = rng.choice([rank for rank in range(4) if rank not in odd])
    start, kept = rng.randint(0, seq - 1), rng.randint(seq, seq + 2)
    return [of_rank[kept if rank == late else start :] for rank, of_rank in enumerate(records)], [seq, odd]


def with_most_absent(rng: Random) -> Case:
    """Of four ranks, one only has entered the last collective; to be absent together is no agreement."""
    records, last, odd = in_step(rng, 4), rng.randint(1, LENGTH - 1), rng.randrange(4)
    ended = [of_rank[: last + (rank == odd)] for rank, of_rank in enumerate(records)]
    return ended, [last + 1, [rank for rank in range(4) if rank != odd]]


def with_absent(rng: Random, world_size: int) -> Case:
    """One rank never entered a collective that the others are in."""
    records, odd = in_step(rng, world_size), rng.randrange(world_size)
    last = rng.randint(5, LENGTH - 1)
    records[odd] = records[odd][:last]
    return [of_rank[: last + 1] for of_rank in records], [last + 1, [odd]]


def cases_of(rng: Random) -> dict[str, list[Case]]:
    """Choose the cases of each check."""
    return {
        "op": [with_other_op(rng, 3), with_other_op(rng, 5, swapped=True)],
        "size": [with_other_size(rng, 4)],
        "window": [with_windows(rng, 3), with_windows(rng, 4), with_late_start(rng)],
        "absent": [with_absent(rng, 3), with_absent(rng, 4), with_most_absent(rng)],
        "none": [(in_step(rng, 4), None), ([of_rank[i:] for i, of_rank in enumerate(in_step(rng, 3))], None)],
    }


def records_driver(rank: int, world_size: int, function: Callable, cases: list[list[list[Record]]]) -> list[Any]:
    """Have each case looked at; what the function raises costs that case only."""
    return [_outcome(function, records) for records in copy.deepcopy(cases)]


def _outcome(function: Callable, records: list[list[Record]]) -> Any:
    try:
        found = function(records)
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not isinstance(found, tuple | list) or len(found) != 2:
        return plain(found)
    seq, ranks = found
    return [plain(seq), sorted(ranks) if isinstance(ranks, list | tuple | set) else plain(ranks)]


def records_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Have all cases looked at in one process."""
    cases = cases_of(rng)
    (found,) = answer.run(records_driver, 1, [records for of_check in cases.values() for records, _ in of_check])
    results = iter(found)
    for key, of_check in cases.items():
        faults = [_fault(key, *case, next(results)) for case in of_check]
        yield key, next(filter(None, faults), None)


def _fault(key: str, records: list[list[Record]], expected: Any, found: Any) -> Fault | None:
    if found == expected:
        return None
    wanted = "None" if expected is None else f"({expected[0]}, {expected[1]})"
    shown = f"({found[0]}, {found[1]})" if isinstance(found, list) and len(found) == 2 else str(found)
    return Fault(f"{wanted}, among {len(records)} ranks", shown, cause=_cause(key, records, expected, found))


def _cause(key: str, records: list[list[Record]], expected: Any, found: Any) -> str:
    if isinstance(found, str):
        if "unpack" not in found:
            return "the function raised; not every rank has an entry for every number"
        return "an entry is (number, operation, sizes)"
    if expected is None:
        seq = found[0] if isinstance(found, list) else None
        ops = {op for of_rank in records for number, op, _ in of_rank if number == seq}
        if ops == {"all_to_all"}:
            return "to an all_to_all each rank may bring other sizes"
        return "the recorders dropped other old entries; a number that a rank has dropped says nothing about it"
    late = any(of_rank[0][0] > expected[0] for of_rank in records)
    if late and (found is None or isinstance(found, list) and found[0] != expected[0]):
        return "begin at the first number that any list holds; ranks that still have it may disagree there already"
    if found is None:
        named = {"size": "compare the sizes, too", "absent": "a list that ends earlier than the others is one, too"}
        return named.get(key, "one rank calls another operation")
    if not isinstance(found, list) or len(found) != 2:
        return "return the number and the list of ranks, or None"
    if found[0] == expected[0]:
        if key == "absent" and len(expected[1]) > 1:
            return "the absent are no group, however many; the largest group is one of ranks that did enter"
        return "the ranks to name are those outside the majority, in a list"
    if key == "window" or not isinstance(found[0], int) or found[0] < expected[0]:
        seq = found[0]
        ops = {op for of_rank in records for number, op, _ in of_rank if number == seq}
        if ops == {"all_to_all"}:
            return "to an all_to_all each rank may bring other sizes"
        return "compare entries of the same number, which need not be at the same place in the lists"
    if key == "absent":
        return "the first number that the rank has not entered, though others have"
    return "this comes later: after the first disagreement the ranks are out of step anyway"


RECORDS = Exercise(
    "12.4",
    "Find the first disagreement (stretch)",
    "first_disagreement",
    25,
    (
        Check("op", "ranks that call another operation", 1),
        Check("size", "a rank that brings another size", 1),
        Check("window", "lists that begin at different numbers", 1),
        Check("absent", "a rank that never came", 1),
        Check("none", "records without a disagreement", 1),
    ),
    records_judge,
)
