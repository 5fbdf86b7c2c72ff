"""12.4 `first_disagreement(records)`: where do the recorded collectives of the ranks part ways?

The records have the form of torch's Flight Recorder: a number, an operation, the sizes. Each case has one mistake, or
none, at a place that the seed chooses.

Read next: `grading/checking.py`, what becomes of all this.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import exercise
from ddp_course.grading.vocabulary.play import Round, Seen

Record = tuple[int, str, list[int]]
Case = tuple[list[list[Record]], Any]  # the records by rank, and what is to be found

LENGTH = 12
OPS = ("all_reduce", "all_gather", "broadcast")
OTHERS = (lambda n: [n + 1, 4], lambda n: [n, 5], lambda n: [n, 4, 1], lambda n: [4, n] if n != 4 else [8, 2])
TO_ALL = "to an all_to_all each rank may bring other sizes"


def in_step(rng: Random, world_size: int, eighth: str = "all_reduce") -> list[list[Record]]:
    """Make records that agree. Each rank brings sizes of its own to all_to_all, as it may."""
    records: list[list[Record]] = [[] for _ in range(world_size)]
    for seq in range(1, LENGTH + 1):
        op = rng.choice(("all_reduce", "all_reduce", "broadcast", "all_gather", "barrier", "all_to_all"))
        op = {3: "all_to_all", 8: eighth}.get(seq, op)
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


def with_all_to_all(rng: Random, seq: int) -> Case:
    """One rank alone calls all_to_all, or alone does not."""
    records, odd = in_step(rng, 4), rng.randrange(4)
    records[odd][seq - 1] = (seq, "all_to_all" if seq == 8 else "all_reduce", records[odd][seq - 1][2])
    return records, [seq, [odd]]


def with_other_size(rng: Random, op: str, other: Callable[[int], list[int]]) -> Case:
    """One rank brings other sizes than [n, 4] to a collective."""
    records, odd = in_step(rng, 4, op), rng.randrange(4)
    records[odd][7] = (8, op, other(records[odd][7][2][0]))
    return records, [8, [odd]]


def with_three_groups(rng: Random) -> Case:
    """Of seven ranks, four agree, two bring another size, and one calls another operation."""
    records, seq = in_step(rng, 7), 8
    one, *two = rng.sample(range(1, 7), 3)
    for rank in (one, *two):
        records[rank][seq - 1] = (seq, "all_reduce", [1]) if rank in two else (seq, "gather", [1])
    return records, [seq, sorted([one, *two])]


def with_windows(rng: Random, world_size: int) -> Case:
    """The recorders kept windows of other lengths; one rank has another operation in the part that all have."""
    records, found = with_other_op(rng, world_size)
    starts = rng.sample(range(4), world_size)
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


def rounds(rng: Random) -> list[Round]:
    """Choose the cases of each check."""
    cases = {
        "op": [with_other_op(rng, 3), with_other_op(rng, 5, swapped=True), *(with_all_to_all(rng, n) for n in (3, 8))],
        "size": [*(with_other_size(rng, *each) for each in product(OPS, OTHERS)), with_three_groups(rng)],
        "window": [with_windows(rng, 3), with_windows(rng, 4), with_late_start(rng)],
        "absent": [with_absent(rng, 3), with_absent(rng, 4), with_most_absent(rng)],
        "none": [(in_step(rng, 4), None), ([of_rank[i:] for i, of_rank in enumerate(in_step(rng, 3))], None)],
    }
    named = [(name, (name, *case)) for name, of_check in cases.items() for case in of_check]
    return [Round(1, named, raises=(Exception,), init=False)]


def act(function, case: tuple, rank: int, world_size: int) -> Any:
    """Have the records looked at; a set of ranks is as good as a list."""
    found = function(case[1])
    if not isinstance(found, tuple | list) or len(found) != 2:
        return found
    seq, ranks = found
    return [seq, sorted(ranks) if isinstance(ranks, list | tuple | set) else ranks]


def first(seen: Seen) -> Fault | None:
    """The number of the first disagreement and the ranks outside the majority, or None."""
    (_, records, expected), found = seen.case, seen["value"]
    if found == expected and not seen["error"]:
        return None
    wanted = "None" if expected is None else f"({expected[0]}, {expected[1]})"
    shown = f"({found[0]}, {found[1]})" if isinstance(found, list) and len(found) == 2 else str(found)
    shown = f"{seen['error']}: {seen['message']}" if seen["error"] else shown
    return Fault(f"{wanted}, among {len(records)} ranks", shown, cause=_cause(seen, *seen.case, found))


def _cause(seen: Seen, key: str, records: list[list[Record]], expected: Any, found: Any) -> str:
    if seen["error"]:
        unpacked = "unpack" in seen["message"] and "an entry is (number, operation, sizes)"
        return unpacked or "the function raised; not every rank has an entry for every number"
    named = found[0] if isinstance(found, list) and found else None
    ops = {op for of_rank in records for number, op, _ in of_rank if number == named}
    if expected is None:
        if ops == {"all_to_all"}:
            return TO_ALL
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
        if ops == {"all_to_all"}:
            return TO_ALL
        return "compare entries of the same number, which need not be at the same place in the lists"
    if key == "absent":
        return "the first number that the rank has not entered, though others have"
    return "this comes later: after the first disagreement the ranks are out of step anyway"


RECORDS = exercise(
    "12.4",
    "Find the first disagreement (stretch)",
    "first_disagreement",
    25,
    act=act,
    rounds=rounds,
    checks={
        "op": ("ranks that call another operation", 1, first, "op"),
        "size": ("a rank that brings another size", 1, first, "size"),
        "window": ("lists that begin at different numbers", 1, first, "window"),
        "absent": ("a rank that never came", 1, first, "absent"),
        "none": ("records without a disagreement", 1, first, "none"),
    },
)
