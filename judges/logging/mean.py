"""09.1 `mean_loss(rank, world_size, losses)`: is it the mean over all rows, on every rank, with little talk?

Read `shards.py` first. Read next: `writer.py`.
"""

from __future__ import annotations

from random import Random

import torch

from ddp_course.grading.vocabulary.expect import equals, exercise, one_number, refuses, talks
from ddp_course.grading.vocabulary.means import mean_slips
from ddp_course.grading.vocabulary.play import Round
from judges.logging.shards import SAME, SKIPPED, losses, unequal

MANY_ROWS = 600  # so many that rows on the way cannot be taken for sums
REFUSALS = (ValueError, ZeroDivisionError, AssertionError)


def act(function, case: list[torch.Tensor], rank: int, world_size: int):
    """A case has the rows of each rank."""
    return function(rank, world_size, case[rank])


def rounds(rng: Random) -> list[Round]:
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


the_mean = equals(
    lambda seen, right: f"{right:.4f}, the mean of {' + '.join(str(len(part)) for part in seen.case)} rows",
    lambda seen: torch.cat(seen.case).double().mean().item(),
    lambda seen: mean_slips(seen.case, seen.rank),
    "the mean is the sum over all ranks / the count over all ranks, and `reduce` leaves it on dst only",
    tolerance=SAME,
    form=one_number(
        "nan: the mean of no rows is 0 divided by 0, and spreads to all; send sum and count, which are 0 then"
    ),
)
no_mean = refuses(
    "ValueError",
    "on every rank, where no rank has a row",
    "look at the count over all ranks, then raise ValueError",
    lambda found: (
        "a loss of 0 looks like a perfect model; a count of 0 has no mean, so raise ValueError"
        if found == 0
        else "0 divided by 0 is nan for tensors; look at the count over all ranks before you divide"
    ),
)
few = talks(2, "sums and counts", lambda seen: seen.case[seen.rank].nbytes)

MEAN = exercise(
    "09.1",
    "The mean over all rows",
    "mean_loss",
    10,
    act=act,
    rounds=rounds,
    checks={
        "mean": ("every rank has the mean over all rows", 2, the_mean, "unequal"),
        "few": ("sums and counts travel, in at most two collectives", 1, few, "unequal"),
        "empty": ("a rank without rows joins, and does no harm", 1, the_mean, "empty"),
        "nothing": ("no rows at all are refused", 1, no_mean, "nothing"),
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
)
