"""09.1 `mean_loss(rank, world_size, losses)`: is it the mean over all rows, on every rank, with little talk?

Read `shards.py` first. Read next: `writer.py`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from ddp_course.grading.differential import exercise, value
from ddp_course.grading.vocabulary.communication import talks
from ddp_course.grading.vocabulary.rounds import Round, Seen
from judges.logging.shards import SAME, SKIPPED, losses, unequal

MANY_ROWS = 600  # so many that rows on the way cannot be taken for sums
REFUSALS = (ValueError, ZeroDivisionError, AssertionError)


def cases(rng: Random) -> list[Round]:
    """Unequal shards; no rows on the last rank, on rank 0, on all but one; one row in all; and none at all."""
    many = rng.choice((3, 4))
    few = 5 - many // 2  # 4, 3
    sizes = unequal(rng, few, least=3, step=5)
    lonely = [
        [losses(rng, 0 if rank in without else rows) for rank, rows in enumerate(sizes)]
        for without in ([few - 1], [0], range(1, few))
    ]
    single = [losses(rng, rank == few - 1) for rank in range(few)]
    cancel = [torch.tensor([1.5, -1.5]) * rank for rank in range(few)]  # rows there are, and their sum is 0
    return [
        Round(many, [("unequal", [losses(rng, rows) for rows in unequal(rng, many, least=MANY_ROWS)])]),
        Round(few, [("empty", parts) for parts in (*lonely, single, cancel)]),
        Round(2, [("nothing", [torch.zeros(0)] * 2)], REFUSALS),
    ]


def act(function, case: list[torch.Tensor], rank: int, world_size: int) -> Any:
    """A case has the rows of each rank."""
    return function(rank, world_size, case[rank])


def refusal(seen: Seen) -> Any:
    return "ValueError" if "ValueError" in (seen["kinds"] or ()) else seen["error"] or seen["value"]


MISTAKES = r"""
mean of means | mean empty
| this is the mean of the ranks' means; ranks have different numbers of rows: reduce sums and counts
    losses.sum(dtype=torch.float64), len(losses)] => losses.mean() if len(losses) else 0.0, bool(len(losses))]
own rows alone | all | this is the mean of this rank's rows alone; the other ranks' rows are missing
    dist.all_reduce(sum_and_count) => pass
own rows alone, nan without rows | all | this is the mean of this rank's rows alone | tests
    def mean_loss(rank, world_size, losses):
        return losses.mean()
the local count | mean empty | the sum of all ranks is divided by this rank's count; reduce the counts
    return total / count => return total / max(len(losses), 1)
divided by the world size | mean empty
| the sum is divided by the number of ranks; divide it by the number of all rows
    return total / count => return total / world_size
the sum | mean empty | this is the sum over all rows; divide it by the number of all rows
    return total / count => return total
0 / 0 on a rank without rows | empty
| nan: the mean of no rows is 0 divided by 0, and spreads to all; send sum and count, which are 0 then
    losses.sum(dtype=torch.float64), => losses.mean() * len(losses),
no rows count as one | empty nothing | a rank without rows counts 0 rows, not 1
    , len(losses)] => , max(len(losses), 1)]
a sum of 0 is taken for no rows | empty nothing
| other ranks have rows here, so there is a mean; a rank without rows sends a sum of 0 and a count of 0
    if count == 0: => if total == 0:
the mean of nothing is 0 | nothing | a loss of 0 looks like a perfect model; a count of 0 has no mean
    raise ValueError("there is no mean: no rank has a row") => return 0.0
the mean of nothing divides by zero | nothing | look at the count over all ranks, then raise ValueError
    if count == 0: => if count < 0:
reduce to rank 0 | mean empty nothing | `reduce` leaves it on dst only
    all_reduce(sum_and_count) => reduce(sum_and_count, dst=0)
all rows are gathered | few | the rows travel | tests
    def mean_loss(rank, world_size, losses):
        everyone = [None] * world_size
        dist.all_gather_object(everyone, losses)
        rows = torch.cat(everyone)
        if not len(rows):
            raise ValueError("no rank has a row")
        return rows.mean()
number by number, with that of the ranks | few | each collective has a price of its own
    dist.all_reduce(sum_and_count) => for number in (*sum_and_count.split(1), torch.ones(1)):
        dist.all_reduce(number)
the course's own | all | this exercise is to write | tests
    from ddp_course import metrics

    def mean_loss(rank, world_size, losses):
        return metrics.mean_over_ranks(losses.sum(), len(losses), torch.device("cpu"))
all_reduce of the rows | all | ranks have different numbers of rows | hangs
    dist.all_reduce(sum_and_count) => dist.all_reduce(losses)
a rank without rows is refused at once | empty nothing | looks at the count over all ranks | hangs
    dist.all_reduce => if not len(losses):
        raise ValueError("no rows")
    dist.all_reduce
"""

RIGHT = """
objects, gathered
    def mean_loss(rank, world_size, losses):
        everyone = [None] * world_size
        dist.all_gather_object(everyone, (sum(losses.tolist()), len(losses)))
        rows = sum(count for _, count in everyone)
        if rows < 1:
            raise ValueError("no rank has a row")
        return torch.tensor([sum(total for total, _ in everyone) / rows])
"""

THE_MEAN = "return the sum over all ranks / the count over all ranks, on every rank: `reduce` leaves it on dst only"

MEAN = exercise(
    *("09.1", "The mean over all rows", "mean_loss", 10),
    cases=cases,
    act=act,
    tolerance=SAME,
    said=lambda seen: f"of {' + '.join(str(len(part)) for part in seen.case)} rows:",
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "mean": ("every rank has the mean over all rows", 2, "unequal", value, THE_MEAN),
        "few": ("sums and counts travel, in at most two collectives", 1, "unequal",
                talks(2, "sums and counts", lambda seen: seen.case[seen.rank].nbytes), ""),
        "empty": ("a rank without rows joins, and does no harm", 1, "empty", value,
                  f"{THE_MEAN}; nan is the mean of no rows, and spreads to all: send sum and count"),
        "nothing": ("no rows at all are refused", 1, "nothing", refusal,
                    "look at the count over all ranks, then raise ValueError, on every rank"),
    },
    refused=("ddp_course.metrics.mean_over_ranks", "ddp_course.metrics.MeanMetrics"),
    hints={
        r"raised (ValueError|ZeroDivisionError|AssertionError)": "other ranks have rows here, so there is a mean; a "
        "rank without rows sends a sum of 0 and a count of 0, and looks at the count over all ranks, which all_reduce "
        "brings to every rank",
        "sizes; disagree: different sizes; (?i:mismatch)": "all_reduce adds tensors of one shape, but ranks have "
        "different numbers of "
        "rows; send sum and count",
        **SKIPPED,
    },
)  # fmt: skip
