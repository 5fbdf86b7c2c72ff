"""04.1 `gather_rows(rank, world_size, rows)`: has every rank all rows, in order, when the ranks bring unequal numbers?

A round for equal numbers and one for each kind of unequal ones, so that a crash in one leaves the others' points.
Read next: `ring.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import exercise
from ddp_course.grading.vocabulary.play import Note, Round, Seen

Rows = list[list[float]]
EXACT = 2**53 + 1  # a whole number that no float holds
SENTINELS = (0, -1, math.nan, math.inf, -math.inf, torch.finfo(torch.float32).min)  # what may be taken for padding


@dataclass(frozen=True)
class Case:
    """The rows that each rank brings."""

    rows: list[Rows]
    columns: int
    dtype: str

    def tensor(self, rank: int) -> torch.Tensor:
        """Return the rows of a rank, (N, columns)."""
        return torch.tensor(self.rows[rank], dtype=getattr(torch, self.dtype)).reshape(-1, self.columns)


def make_case(counts: list[int], rng: Random, dtype: str = "float32", add: float = 0, columns: int = 0) -> Case:
    """Choose rows for each rank, of several values each; but the last rows of the longest look like padding."""
    columns = columns or rng.randint(2, 4)
    rows = [[[n + add for n in rng.sample(range(1, 99), columns)] for _ in range(count)] for count in counts]
    longest = max(rows, key=len)
    if not add and columns > 1:
        like_padding = [[value] * columns for value in SENTINELS[: max(0, len(longest) - 1)]]
        longest[len(longest) - len(like_padding) :] = like_padding
    return Case(rows, columns, dtype)


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note the rows, or what else came back."""
    found = function(rank, world_size, case.tensor(rank))
    if not isinstance(found, torch.Tensor):
        return Note(returned="None" if found is None else f"a {type(found).__name__}")
    return Note(rows=as_text(found), shape=list(found.shape), dtype=str(found.dtype).removeprefix("torch."))


def as_text(rows: torch.Tensor) -> list[str]:
    """Return rows as texts, in which nan is nan."""
    return list(map(str, rows.tolist()))


def _varied(rows: list[str]) -> list[str]:
    return [row for row in rows if len(set(row.strip("[]").split(", "))) > 1]


def rounds(rng: Random) -> list[Round]:
    """Equal numbers of rows, unequal ones, ranks without rows, whole numbers that a float would round."""
    unequal = [rng.randint(2, 4), rng.randint(260, 300), 1, rng.randint(5, 9)][: rng.choice((3, 4))]
    counts = {
        "equal": [[rng.randint(2, 3)] * 2, [1, 1]],
        "unequal": [unequal, unequal[::-1]],
        "empty": [*rng.sample(([0, 3, 2], [2, 0, 1], [3, 1, 0]), 3), [0] * 3],
    }
    cases = {name: [make_case(of_ranks, rng) for of_ranks in several] for name, several in counts.items()}
    cases["equal"].append(make_case([2, 2], rng, columns=1))
    cases["dtype"] = [make_case([2, 1], rng, "int64", EXACT), make_case([1, 3], rng, "float64", 0.1)]
    return [Round(len(all_[0].rows), [(name, case) for case in all_]) for name, all_ in cases.items()]


def all_rows(seen: Seen) -> Fault | None:
    """Every rank has the rows of all, by rank, in their dtype."""
    case, found, shape, dtype = seen.case, seen["rows"], seen["shape"], seen["dtype"]
    everything = [row for brought in range(seen.world_size) for row in as_text(case.tensor(brought))]
    if (found, shape, dtype) == (everything, [len(everything), case.columns], case.dtype):
        return None
    brought = ", ".join(str(len(rows)) for rows in case.rows)
    expected = f"{len(everything)} rows of {case.columns}, {case.dtype}; ranks bring {brought} rows"
    said = seen["returned"] or f"a tensor of shape {shape}, {dtype}"
    if len(shape or []) == 2:
        said = f"{shape[0]} rows of {shape[1]}, {dtype}{', beginning ' * bool(found)}{', '.join(found[:2])}"
    return Fault(expected, said, seen.rank, mistake(seen, everything))


def mistake(seen: Seen, everything: list[str]) -> str:
    """Name the mistake that leads to such rows."""
    parts, found = [as_text(seen.case.tensor(rank)) for rank in range(seen.world_size)], seen["rows"]
    mine = parts[seen.rank]
    if seen["returned"] == "None":
        return "return the tensor, on every rank; gather and reduce give their result to dst only"
    if seen["returned"]:
        return "return one tensor; torch.cat puts a list of tensors together"
    if len(seen["shape"]) != 2 or seen["shape"][1] != seen.case.columns:
        return "the result has one row after another, as in rows; join the ranks' parts along dimension 0"
    if seen["dtype"] != seen.case.dtype:
        return "the dtype changed; make padding and results with dtype=rows.dtype"
    if found == mine:
        return "these are the rank's own rows: those of the others did not reach it"
    if sorted(found) == sorted(everything):
        return "all rows are there, in another order; the rows of rank 0 come first, then those of rank 1, and so on"
    if len(found) == len(parts) * len(mine) and len(mine) < max(map(len, parts)):
        return "each part was cut to this rank's own number of rows; cut it to the number of the rank that brought it"
    if found == [row for part in parts for row in part[: min(map(len, parts))]]:
        return "longer parts were cut off; pad every rank's rows to the largest number of rows"
    if len(found) > len(everything) and _varied(found) == _varied(everything):
        return "rows of padding are left in; cut each rank's part to the number of rows that it brought"
    if len(found) < len(everything) and _varied(found) == _varied(everything):
        lost = "a row of zeros, -1 or nan that a rank brought is lost: padding cannot be told by its values; "
        return lost + "send the numbers of rows first, and cut by them"
    if len(found) > len(everything) and all(row in found for row in everything):
        return "some rows are in it twice; each rank's part belongs into the result once"
    if len(found) == len(everything) and seen.case.dtype == "int64":
        return "these whole numbers went through a float, which rounds them; keep the dtype all the way"
    if len(found) == len(everything):
        return "the parts are cut at the wrong places; cut each by the number of rows of the rank that brought it"
    return "some rows are missing; pad to the largest number of rows of any rank, gather, and cut each part by its own"


GATHER_ROWS = exercise(
    "04.1",
    "All rows on every rank",
    "gather_rows",
    15,
    act=act,
    rounds=rounds,
    checks={
        "equal": ("all rows, by rank, when every rank brings as many", 1, all_rows, "equal"),
        "unequal": ("so it is when ranks bring different numbers of rows", 2, all_rows, "unequal"),
        "empty": ("also when a rank has no rows, or rows of zeros", 1, all_rows, "empty"),
        "dtype": ("the dtype is kept, and every digit", 1, all_rows, "dtype"),
    },
    refused=(
        *(f"torch.distributed.{name}_object" for name in ("all_gather", "gather")),
        *(f"torch.distributed.{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")),
        *("pickle.dumps", "pickle.dump", "torch.save"),
    ),
    hints={
        r"its error was caught": "an error was caught on the way, and what came back are the rank's own rows",
        r"different (sizes|dtypes)|invalid tensor size|doesn't match expected size|invalid tensor type": "the tensors "
        "of one collective must have the same shape and dtype on every rank: gather the numbers of rows first, pad to "
        "the largest, and cut afterwards",
        r"expanded size of the tensor|must match the existing size|negative dimension|Padding length": "the rows do "
        "not fit into what they are written to; pad to the largest number of rows among the ranks",
        r"Sizes of tensors must match|must have the same number of dimensions|expected a non-empty|empty": "a rank may "
        "have no rows; keep two dimensions, (0, columns), also then",
        "disagree|absent|cut-off": "one rank skips a collective that the others "
        "wait in; a rank without rows must join all of them, too",
        "limit; [Tt]imed out": "the ranks wait for each other: each must call the same collectives, as often "
        "as the others; a rank without rows, and the last one, must join them, too",
    },
)
