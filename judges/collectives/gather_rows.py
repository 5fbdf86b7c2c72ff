"""04.1 `gather_rows(rank, world_size, rows)`: has every rank all rows, in order, when the ranks bring unequal numbers?

Rows travel as text, in which nan is nan. Read next: `ring.py`.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

import torch

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

LIKE_PADDING = (0.0, -1.0, math.nan, math.inf, -math.inf, torch.finfo(torch.float32).min)


def made(rng: Random, counts: list[int], dtype: str = "float32", add: float = 0.0, columns: int = 0) -> tuple:
    """Rows for each rank, of several values each; but the last rows of the longest look like padding."""
    columns = columns or rng.randint(2, 4)
    rows = [[[n + add for n in rng.sample(range(1, 99), columns)] for _ in range(count)] for count in counts]
    longest = max(rows, key=len)
    if not add and columns > 1:
        odd = [[value] * columns for value in LIKE_PADDING[: max(0, len(longest) - 1)]]
        longest[len(longest) - len(odd) :] = odd
    return rows, columns, dtype


def cases(rng: Random) -> list[Round]:
    """Equal numbers of rows, unequal ones, ranks without rows, numbers that a float would round: each a round."""
    unequal = [rng.randint(2, 4), rng.randint(260, 300), 1, rng.randint(5, 9)][: rng.choice((3, 4))]
    empty = [*rng.sample(([0, 3, 2], [2, 0, 1], [3, 1, 0]), 3), [0] * 3]
    equal = [made(rng, [3, 3]), made(rng, [1, 1]), made(rng, [2, 2], columns=1)]
    return [
        Round(2, [("equal", case) for case in equal]),
        Round(len(unequal), [("unequal", made(rng, counts)) for counts in (unequal, unequal[::-1])]),
        Round(3, [("empty", made(rng, counts)) for counts in empty]),
        Round(2, [("dtype", made(rng, [2, 1], "int64", 2**53 + 1)), ("dtype", made(rng, [1, 3], "float64", 0.1))]),
    ]


def act(function, case: tuple, rank: int, world_size: int) -> Note:
    rows, columns, dtype = case
    found = function(rank, world_size, torch.tensor(rows[rank], dtype=getattr(torch, dtype)).reshape(-1, columns))
    if not isinstance(found, torch.Tensor):
        return Note(form="None" if found is None else f"a {type(found).__name__}", rows=[])
    return Note(form=f"a tensor of shape {list(found.shape)}, {found.dtype}", rows=list(map(str, found.tolist())))


def all_rows(seen: Seen) -> dict[str, Any]:
    return {"": seen["form"], "row": seen["rows"]}


MISTAKES = """
padding left in | unequal empty dtype
| rows of padding are left in; cut each rank's part to the number of rows that it brought
    part[:count] => part
rows of zeros taken for padding | equal unequal empty
| a row of zeros, -1 or nan is lost: padding cannot be told by its values; send the numbers of rows first
    part[:count] => part[part.any(dim=1)]
cut by its own number | unequal empty dtype
| each part was cut to this rank's own number of rows; cut it to the number of the rank that brought it
    part[:count] => part[: len(rows)]
longer parts cut off | unequal empty dtype
| longer parts were cut off; pad every rank's rows to the largest number of rows
    int(counts.max()) => int(counts.min())
    padded[: len(rows)] = rows => padded[: len(rows)] = rows[:longest]
numbers of rows in a byte | unequal | a byte counts to 255: send the numbers of rows as int64
    int(counts.max()) => int((counts % 256).max())
    padded[: len(rows)] = rows => padded[: len(rows)] = rows[: len(padded)]
    part[:count] => part[: count % 256]
its own rows alone | all | these are the rank's own rows: those of the others did not reach it
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]) => return rows
its own rows first | all
| all rows are there, in another order; the rows of rank 0 come first, then those of rank 1, and so on
    return torch.cat => return torch.cat([rows, *(p[:c] for i, (p, c) in enumerate(zip(parts, counts)) if i != rank)])
    return torch.cat
rank 0 alone | all | return the tensor, on every rank; gather and reduce give their result to dst only
    return torch.cat => return None if rank else torch.cat
a list | all | return one tensor; torch.cat puts a list of tensors together
    torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]) => list(parts)
everything as float32 | dtype | the dtype changed; make padding and results with dtype=rows.dtype
    rows.new_zeros(longest, columns) => torch.zeros(longest, columns)
    rows.new_empty(world_size * longest, => torch.empty(world_size * longest,
through a float and back | dtype
| these whole numbers went through a float, which rounds them; keep the dtype all the way
    padded[: len(rows)] = rows => padded[: len(rows)] = rows.double().to(rows.dtype)
takes equal numbers for granted | unequal empty dtype | gather the numbers of rows first | tests
    def gather_rows(rank, world_size, rows):
        table = torch.empty(world_size * len(rows), rows.shape[1], dtype=rows.dtype)
        dist.all_gather_into_tensor(table, rows)
        return table
swallows every error | all | an error was caught on the way | tests
    def gather_rows(rank, world_size, rows):
        try:
            parts = [torch.empty(1, 1) for _ in range(world_size)]
            dist.all_gather(parts, rows)
            return torch.cat(parts)
        except Exception:
            return rows
a rank without rows goes home | empty dtype | a rank without rows, and the last one, must join them, too | hangs
    padded[: => if len(rows) == 0:
        return rows
    padded[:
"""

OTHERWISE = "pad to the largest number of rows of any rank, gather, and cut each part by its number, not by its values"

GATHER_ROWS = exercise(
    *("04.1", "All rows on every rank", "gather_rows", 15),
    cases=cases,
    act=act,
    said=lambda seen: f"ranks bring {', '.join(str(len(part)) for part in seen.case[0])} rows; every rank returns",
    mistakes=MISTAKES,
    checks={
        key: (words, points, key, all_rows, OTHERWISE)
        for key, words, points in (
            ("equal", "all rows, by rank, when every rank brings as many", 1),
            ("unequal", "so it is when ranks bring different numbers of rows", 2),
            ("empty", "also when a rank has no rows, or rows of zeros", 1),
            ("dtype", "the dtype is kept, and every digit", 1),
        )
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
