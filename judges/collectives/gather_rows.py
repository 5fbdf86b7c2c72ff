"""04.1 `gather_rows(rank, world_size, rows)`: has every rank all rows, in order, when the ranks bring unequal numbers?

One launch for equal numbers and one for each kind of unequal ones, so that a crash in one leaves the others' points.
Read next: `ring.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from judges.collectives.traffic import each_case, run_cases

Rows = list[list[float]]
EXACT = 2**53 + 1  # a whole number that no float holds


def rows_driver(rank: int, world_size: int, function: Callable, path: str, cases: list[dict]) -> list[dict]:
    """Call the function on this rank's rows of each case; note what it returned."""

    def look(case: dict) -> dict:
        rows = torch.tensor(case["rows"][rank], dtype=getattr(torch, case["dtype"])).reshape(-1, case["columns"])
        found = function(rank, world_size, rows)
        if not isinstance(found, torch.Tensor):
            return {"returned": "None" if found is None else f"a {type(found).__name__}"}
        dtype = str(found.dtype).removeprefix("torch.")
        return {"value": found.reshape(-1).tolist(), "shape": list(found.shape), "dtype": dtype}

    return each_case(rank, world_size, path, cases, look)


def rows_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Equal numbers of rows, unequal ones, ranks without rows, whole numbers that a float would round."""
    n_rows = rng.randint(2, 3)
    yield "equal", _fault(answer, [_case([n_rows] * 2, rng), _case([1, 1], rng)])
    world_size = rng.choice((3, 4))
    few_and_many = [rng.randint(2, 4), rng.randint(40, 60), 1, rng.randint(5, 9)][:world_size]
    yield "unequal", _fault(answer, [_case(few_and_many, rng), _case(few_and_many[::-1], rng)])
    one_empty = [[0, 3, 2, 1], [2, 0, 1, 3], [1, 2, 3, 0]]
    yield (
        "empty",
        _fault(answer, [_case(counts[:3], rng) for counts in rng.sample(one_empty, 3)] + [_case([0] * 3, rng)]),
    )
    yield "dtype", _fault(answer, [_case([2, 1], rng, "int64", EXACT), _case([1, 3], rng, "float64", 0.1)])


def _case(counts: list[int], rng: Random, dtype: str = "float32", add: float = 0) -> dict:
    """Choose rows for each rank. The last row of the first rank that has two is all zeros, and no padding."""
    columns = rng.randint(2, 4)
    rows = [[[rng.randint(1, 99) + add for _ in range(columns)] for _ in range(count)] for count in counts]
    first = next((of_rank for of_rank in rows if len(of_rank) > 1), None)
    if first and not add:
        first[-1] = [0] * columns
    return {"rows": rows, "columns": columns, "dtype": dtype}


def _fault(answer: Answer, cases: list[dict]) -> Fault | None:
    world_size = len(cases[0]["rows"])
    by_rank = run_cases(answer, rows_driver, world_size, cases)
    for index, case in enumerate(cases):
        for rank, notes in enumerate(by_rank):
            if fault := _rank_fault(rank, case, notes[index]):
                return fault
    return None


def _rank_fault(rank: int, case: dict, note: dict) -> Fault | None:
    counts, columns = [len(of_rank) for of_rank in case["rows"]], case["columns"]
    everything = [row for of_rank in case["rows"] for row in of_rank]
    brought = f"ranks bring {', '.join(map(str, counts))} rows"
    expected = f"{len(everything)} rows of {columns}, {case['dtype']}; {brought}"
    if "returned" in note:
        none = note["returned"] == "None"
        cause = "return the tensor, on every rank; gather and reduce give their result to dst only"
        cause = cause if none else "return one tensor; torch.cat puts a list of tensors together"
        return Fault(expected, note["returned"], rank, cause)
    right = {"shape": [len(everything), columns], "dtype": case["dtype"]}
    if note == {**right, "value": [number for row in everything for number in row]}:
        return None
    return Fault(expected, _words(note), rank, _cause(rank, case, note, everything))


def _words(note: dict) -> str:
    if len(note["shape"]) != 2:
        return f"a tensor of shape {note['shape']}, {note['dtype']}"
    rows = _as_rows(note)
    few = ", ".join(str(row) for row in rows[:2])
    return f"{len(rows)} rows of {note['shape'][1]}, {note['dtype']}" + (f", beginning {few}" if rows else "")


def _as_rows(note: dict) -> Rows:
    values, columns = note["value"], note["shape"][1]
    return [values[i : i + columns] for i in range(0, len(values), columns)] if columns else []


def _cause(rank: int, case: dict, note: dict, everything: Rows) -> str:
    """Name the mistake that leads to such rows."""
    parts = case["rows"]
    if len(note["shape"]) != 2 or note["shape"][1] != case["columns"]:
        return "the result has one row after another, as in rows; join the ranks' parts along dimension 0"
    if note["dtype"] != case["dtype"]:
        return "the dtype changed; make padding and results with dtype=rows.dtype"
    found, zero = _as_rows(note), [0] * case["columns"]
    if found == everything:
        return "the shape is not kept"
    shortest, longest = min(map(len, parts)), max(map(len, parts))
    if found == parts[rank]:
        return "these are the rank's own rows: those of the others did not reach it"
    if sorted(found) == sorted(everything):
        return "all rows are there, in another order; the rows of rank 0 come first, then those of rank 1, and so on"
    if len(found) == len(parts) * len(parts[rank]) and len(parts[rank]) < longest:
        return "each part was cut to this rank's own number of rows; cut it to the number of the rank that brought it"
    if len(found) > len(everything) and _without(found, zero) == _without(everything, zero):
        return "rows of padding are left in; cut each rank's part to the number of rows that it brought"
    if len(found) < len(everything) and found in (_without(everything, zero), _cut_zeros(parts, zero)):
        return (
            "a row of zeros that a rank brought is lost: padding cannot be told by its values; "
            "send the numbers of rows first, and cut by them"
        )
    if found == [row for of_rank in parts for row in of_rank[:shortest]]:
        return "longer parts were cut off; pad every rank's rows to the largest number of rows"
    if len(found) > len(everything) and all(row in found for row in everything):
        return "some rows are in it twice; each rank's part belongs into the result once"
    if len(found) == len(everything) and case["dtype"] == "int64":
        return "these whole numbers went through a float, which rounds them; keep the dtype all the way"
    if len(found) == len(everything):
        return "the parts are cut at the wrong places; cut each by the number of rows of the rank that brought it"
    return "some rows are missing; pad to the largest number of rows of any rank, gather, and cut each part by its own"


def _without(rows: Rows, row: list) -> Rows:
    return [other for other in rows if other != row]


def _cut_zeros(parts: list[Rows], zero: list) -> Rows:
    """What is left when each part loses the zeros at its end."""
    left = []
    for part in parts:
        n_rows = len(part)
        while n_rows and part[n_rows - 1] == zero:
            n_rows -= 1
        left += part[:n_rows]
    return left


GATHER_ROWS = Exercise(
    "04.1",
    "All rows on every rank",
    "gather_rows",
    15,
    (
        Check("equal", "all rows, by rank, when every rank brings as many", 1),
        Check("unequal", "so it is when ranks bring different numbers of rows", 2),
        Check("empty", "also when a rank has no rows, or rows of zeros", 1),
        Check("dtype", "the dtype is kept, and every digit", 1),
    ),
    rows_judge,
    refused=(
        "torch.distributed.all_gather_object",
        "torch.distributed.gather_object",
        "torch.distributed.broadcast_object_list",
    ),
    hints=(
        (r"its error was caught", "an error was caught on the way, and what came back are the rank's own rows"),
        (
            r"different (sizes|dtypes)|invalid tensor size|doesn't match expected size|invalid tensor type",
            "the tensors of one collective must have the same shape and dtype on every rank: gather the numbers of "
            "rows first, pad to the largest, and cut afterwards",
        ),
        (
            r"expanded size of the tensor|must match the existing size|negative dimension|Padding length",
            "the rows do not fit into what they are written to; pad to the largest number of rows among the ranks",
        ),
        (
            r"Sizes of tensors must match|must have the same number of dimensions|expected a non-empty|empty",
            "a rank may have no rows; keep two dimensions, (0, columns), also then",
        ),
        (
            r"disagree about collective|never entered|lost the connection",
            "one rank skips a collective that the others wait in; a rank without rows must join all of them, too",
        ),
        (
            r"no result after|[Tt]imed out",
            "the ranks wait for each other: each must call the same collectives, as often as the others; a rank "
            "without rows, and the last one, must join them, too",
        ),
    ),
)
