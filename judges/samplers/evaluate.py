"""05.2 `accuracy(rank, world_size, predict, x, y)`: is each row counted once, by one rank, for a result that all have?

`predict` is the judge's own, and notes which rows it is shown. Read next: `resume.py`.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from judges.samplers.deal import REFUSED


def cases(rng: Random) -> list[Round]:
    """Rows that the ranks divide, rows that they don't, a few or many; then three rows, and nine, on four ranks."""
    ranks, seed = rng.choice((2, 3)), rng.randrange(10**6)
    uneven = ranks * rng.randint(8, 12) + rng.randint(1, ranks - 1)
    many = 2000 * ranks + rng.choice((1, 3, 5))  # odd, and more than float16 can count
    return [
        Round(ranks, [("even", (seed, 24)), ("uneven", (seed, uneven)), ("uneven", (seed, many))]),
        Round(4, [("few", (seed, 3)), ("nine", (seed, 9))]),
    ]


def rows_of(seed: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x of shape (length, 2), whose first column numbers the rows; right labels; and what is predicted."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.stack([torch.arange(float(length)), torch.rand(length, generator=chance)], dim=1)
    y = torch.randint(0, 3, (length,), generator=chance)
    predicted = torch.where(torch.rand(length, generator=chance) < 0.4, y, (y + 1) % 3)
    # Padding begins with row 0. Counted twice, it changes the result, with three rows as well.
    predicted[0], predicted[1] = y[0], (y[1] + 1) % 3
    return x, y, predicted


def act(function, case: tuple, rank: int, world_size: int) -> Note:
    """Note the result, the rows that were predicted on this rank, and whether x or y has changed."""
    x, y, predicted = rows_of(*case)
    shown: list[int] = []

    def predict(rows: torch.Tensor) -> torch.Tensor:
        numbers = rows[:, 0].long()
        shown.extend(numbers.tolist())
        return predicted[numbers]

    result = function(rank, world_size, predict, x, y)
    changed = not all(map(torch.equal, (x, y), rows_of(*case)))
    value = plain(result.item() if isinstance(result, np.generic) else result)
    return Note(value=value, rows=shown, given_changed=changed)


def share(seen: Seen) -> dict[str, Any]:
    return {"accuracy": seen["value"]}


def each_once(seen: Seen) -> dict[str, int]:
    counts = Counter(sum((note["rows"] for note in seen.everyone), []))
    more = sum(times > 1 for times in counts.values())
    return {"rows that no rank predicts:": seen.case[1] - len(counts), "rows that are predicted again:": more}


def shared(seen: Seen) -> dict[str, Any]:
    sizes = [len(note["rows"]) for note in seen.everyone]
    fair = max(sizes) - min(sizes) <= 1 and min(sizes) < seen.case[1]
    return {"rows on each rank:": "as many, or one more" if fair else sizes}


MISTAKES = """
the result on rank 0 alone | even uneven few
| rank 0 has the result, this rank has not: reduce has one receiver, all_reduce has all
    dist.all_reduce(counts) => dist.reduce(counts, dst=0)
    return => return None if rank else
padded evaluation | uneven few once
| the shards are padded: some rows are counted twice; let the shards differ by a row instead
    mine, labels = x[rank::world_size], y[rank::world_size] => length = -(-len(x) // world_size) * world_size
    order = [n % len(x) for n in range(rank, length, world_size)]
    mine, labels = x[order], y[order]
mean of the ranks' accuracies | uneven few
| this is the mean of the ranks' accuracies; shards are unequal, so add up right answers and rows instead
    torch.stack([right, torch.tensor(len(mine))]) => torch.stack([right / max(1, len(mine)), torch.tensor(1.0)])
its own rows only | even uneven few
| this is the accuracy of the rank's own rows; nothing from the other ranks is in it
    dist.all_reduce(counts) => pass
number of right answers | even uneven few | this is the number of right answers; divide by the rows
    / counts[1] => / 1
rows of one rank | even uneven few | divided by the rows of one rank: the sum of rows is over all ranks, too
    / counts[1] => / max(1, len(mine))
counted in float16 | uneven | nearly: add up whole numbers, or float64; float16 can count to 2048
    .double() => .half()
    counts[0] / counts[1] => counts[0].double() / counts[1].double()
everyone evaluates everything | once shared | every rank evaluates everything; give each rank its part
    [rank::world_size] =>
the rest is lost | uneven few once | some rows are predicted by nobody; the rest that does not divide counts, too
    [rank::world_size] => [rank : len(x) // world_size * world_size : world_size]
blocks of equal size, the last ones short | shared
| the work is not shared: every world_size-th row, beginning with the rank's own number, is fair
    mine, labels = => size = -(-len(x) // world_size)
    mine, labels =
    [rank::world_size] => [rank * size : (rank + 1) * size]
rank 0 evaluates everything | shared
| the work is not shared: every world_size-th row, beginning with the rank's own number, is fair
    [rank::world_size] => [: len(x) * (rank == 0)]
a hard-coded value | even uneven few | add up right answers and rows over all ranks | tests
    def accuracy(rank, world_size, predict, x, y):
        predict(x[rank::world_size])
        return 0.5
one number from rank 0 | even uneven few shared | add up right answers and rows over all ranks | tests
    def accuracy(rank, world_size, predict, x, y):
        right = torch.tensor([float((predict(x) == y).float().mean()) if rank == 0 else 0.0])
        dist.all_reduce(right)
        return right.round(decimals=2)
a rank without rows stays away | few once shared | one without rows must take part in it, too | hangs
    right = (predict => if len(mine) == 0:
        return 0.0
    right = (predict
"""

SUM = "add up right answers and rows over all ranks, as whole numbers or float64, then divide, on every rank"

EVALUATE = exercise(
    *("05.2", "An exact evaluation", "accuracy", 15),
    cases=cases,
    act=act,
    said=lambda seen: f"{seen.case[1]} rows on {seen.world_size} ranks:",
    mistakes=MISTAKES,
    checks={
        "even": ("rows that the ranks divide", 1, "even", share, SUM),
        "uneven": ("rows that they do not divide", 2, "uneven", share, SUM),
        "few": ("fewer rows than ranks", 1, "few", share, SUM),
        "once": (
            "each row is predicted once",
            1,
            "even uneven few",
            each_once,
            "every row is in one shard",
        ),
        "shared": ("the ranks share the work", 1, "even uneven few nine", shared, "x[rank::world_size] is fair"),
    },
    hints={
        "absent; limit: waited in": "a rank stayed away from a collective; one without rows must take part in it, too",
        r"IndexError": "chunk() may give fewer parts than asked for; tensor_split(), or x[rank::world_size], does not",
    },
    refused=REFUSED,
)
